/* All rollouts of a run: filters, search, order, keys. */

import { fixed, h, line, number, put, select, visible } from "./dom.js";
import { address, column, get, isExported, isThere, ofRun } from "./api.js";
import { sparkline } from "./plot.js";
import { virtualList } from "./table.js";
import { hashOf, link } from "./route.js";

const MOST_SPARKS = 16;
const MOST_ADDED = 20;
const SEARCH_MS = 250;
const COLUMNS = [
  { key: "step", name: "step", width: "6.5rem" },
  { key: "row", name: "row", width: "3.4rem", right: true },
  { key: "uid", name: "task·index", width: "6rem", right: true, title: "uid of the task, and which of its rollouts" },
  { key: "source", name: "source", width: "7rem" },
  { key: "reward", name: "reward", width: "4.4rem", right: true },
  {
    key: "group",
    name: "group",
    width: "5.6rem",
    sort: false,
    title: "rewards of the rollouts of the same task; this one is filled",
  },
  { key: "advantage", name: "advantage", width: "5.6rem", right: true, title: "mean over the sampled tokens" },
  { key: "tokens", name: "tokens", width: "4.4rem", right: true, title: "sampled by the policy" },
  { key: "turns", name: "turns", width: "3.6rem", right: true },
  {
    key: "stop",
    name: "ended by",
    width: "6rem",
    title: "stop reason of the episode, else finish reason of the reply",
  },
  { key: "calls", name: "calls", width: "3.6rem", right: true },
  {
    key: "flags",
    name: "flags",
    width: "5.6rem",
    title: "malformed: a reply that cannot be read; fault: something broke",
  },
  { key: "prompt", name: "prompt", width: "minmax(7rem, 1fr)" },
  { key: "text", name: "reply", width: "minmax(9rem, 1.8fr)" },
];
const FLAGS = [
  ["calls", "calls"],
  ["malformed", "malformed"],
  ["fault", "fault"],
];
const RANGES = [
  ["step", "step"],
  ["reward", "reward"],
  ["tokens", "tokens"],
];

/** The columns of all rollouts' summaries as plain lists, with what filters need. */
function unpacked(answer) {
  const packed = answer.columns;
  const count = Math.max(
    0,
    ...Object.values(packed).map((one) => (Array.isArray(one) ? one : (one?.codes ?? [])).length),
  );
  const columns = Object.fromEntries(Object.entries(packed).map(([name, one]) => [name, column(one, count)]));
  for (const name of [
    "stage",
    "step",
    "row",
    "uid",
    "index",
    "source",
    "reward",
    "advantage",
    "tokens",
    "turns",
    "finish_reason",
    "stop_reason",
    "calls",
    "malformed",
    "fault",
    "prompt",
    "text",
  ])
    columns[name] ??= new Array(count).fill(null);
  return { columns, count, groups: groupsOf(columns, count) };
}

/** The files of a run by all that is known of them. */
function fileMarks(run) {
  return new Map(
    (run.rollout_files ?? []).map((file) => [`${file.stage}/${file.step}/${file.rows}/${file.bytes}`, file]),
  );
}

/** Add the summaries of one more step. */
function add(data, stage, step, answer) {
  const more = unpacked(answer);
  const place = { stage: new Array(more.count).fill(stage), step: new Array(more.count).fill(step) };
  for (const name of Object.keys(data.columns))
    data.columns[name] = data.columns[name].concat(
      place[name] ?? more.columns[name] ?? new Array(more.count).fill(null),
    );
  data.groups = data.groups.concat(more.groups.map((group) => group.map((n) => n + data.count)));
  data.count += more.count;
}

/** Rows of the same task in the same step: of each row, the list of its group. */
function groupsOf(columns, count) {
  const found = new Map();
  const of = new Array(count);
  for (let n = 0; n < count; n++) {
    const key = `${columns.stage[n]}/${columns.step[n]}/${columns.uid[n]}`;
    let rows = found.get(key);
    if (!rows) found.set(key, (rows = []));
    rows.push(n);
    of[n] = rows;
  }
  return of;
}

/** The rows that a query asks for. hits: rows that a text search has found, or null. */
export function filtered({ columns, count }, query, hits) {
  const tests = [];
  const equal = (name, value) => tests.push((n) => String(columns[name][n] ?? "") === value);
  if (query.stage) equal("stage", query.stage);
  if (query.source) equal("source", query.source);
  if (query.uid) equal("uid", query.uid);
  if (query.finish) equal("finish_reason", query.finish);
  if (query.stop) tests.push((n) => (columns.stop_reason[n] ?? columns.finish_reason[n]) === query.stop);
  for (const [name] of RANGES) {
    const [from, to] = [query[`${name}_from`], query[`${name}_to`]];
    if (from !== undefined && from !== "")
      tests.push((n) => columns[name][n] !== null && columns[name][n] >= Number(from));
    if (to !== undefined && to !== "") tests.push((n) => columns[name][n] !== null && columns[name][n] <= Number(to));
  }
  for (const [name] of FLAGS)
    if (query[name] !== undefined) tests.push((n) => Boolean(columns[name][n]) === (query[name] === "1"));
  if (hits) tests.push((n) => hits.has(`${columns.stage[n]}/${columns.step[n]}/${columns.row[n]}`));
  const found = [];
  for (let n = 0; n < count; n++) if (tests.every((test) => test(n))) found.push(n);
  return found;
}

/** Rows in the order of a column; without a value they come last. */
function sorted({ columns }, rows, key, down) {
  const value =
    {
      stop: (n) => columns.stop_reason[n] ?? columns.finish_reason[n],
      flags: (n) => (columns.fault[n] ? 2 : 0) + (columns.malformed[n] ? 1 : 0),
    }[key] ?? ((n) => columns[key][n]);
  const sign = down ? -1 : 1;
  return rows.slice().sort((a, b) => {
    const [one, two] = [value(a), value(b)];
    if (one === null || two === null) return one === two ? a - b : one === null ? 1 : -1;
    return one === two ? a - b : one < two ? -sign : sign;
  });
}

export async function rolloutsPage(context) {
  const run = context.run;
  const url = address(ofRun(run.id, "rollouts"), { files: "all" });
  const [trouble, nothing] = [h("div", {}), h("p", { class: "note", hidden: true, data: { empty: "" } })];
  let data = taken(await get(url));
  const [bar, count] = [
    h("div", { class: "filters", role: "search" }),
    h("span", { class: "dim", data: { count: "" } }),
  ];
  const search = { text: null, hits: null, told: "" };
  let offered = "";

  const list = virtualList({
    label: "rollouts",
    columns: COLUMNS,
    cells: (n) => {
      const { columns: c } = data;
      const group = data.groups[n];
      return [
        `${visible(c.stage[n])} ${number(c.step[n])}`,
        number(c.row[n]),
        link(["run", run.id, "group", c.stage[n], c.step[n], c.uid[n]], {}, `${c.uid[n]}·${c.index[n]}`),
        line(c.source[n], 40),
        fixed(c.reward[n]),
        group.length > 1 && group.length <= MOST_SPARKS
          ? sparkline(
              group.map((one) => c.reward[one]),
              group.indexOf(n),
            )
          : "",
        fixed(c.advantage[n]),
        number(c.tokens[n]),
        number(c.turns[n]),
        visible(c.stop_reason[n] ?? c.finish_reason[n] ?? "–"),
        number(c.calls[n]),
        [
          c.malformed[n] ? h("span", { class: "flag" }, "malformed") : "",
          c.fault[n]
            ? h("span", { class: "flag bad", title: visible(c.fault[n] === true ? "" : c.fault[n]) }, "fault")
            : "",
        ],
        line(c.prompt[n], 90),
        line(c.text[n], 90),
      ];
    },
    absent: (n) =>
      !isThere(ofRun(run.id, "rollouts", data.columns.stage[n], data.columns.step[n], data.columns.row[n])),
    open: (n) => {
      location.hash = hashOf([
        "run",
        run.id,
        "rollout",
        data.columns.stage[n],
        data.columns.step[n],
        data.columns.row[n],
      ]);
    },
    sorted: (key) => set({ sort: key, down: context.query.sort === key && context.query.down !== "1" ? "1" : null }),
    moved: (place) => context.setQuery({ ...context.query, at: place || null }),
  });

  function taken(answer) {
    const problems = answer.problems ?? [];
    put(
      trouble,
      problems.length > 0 &&
        h(
          "section",
          { class: "panel bad", data: { problems: problems.length } },
          h("h2", {}, "Files that could not be read"),
          h(
            "ul",
            {},
            problems.map((text) => h("li", {}, visible(text))),
          ),
        ),
    );
    return unpacked(answer);
  }

  /** stay: rows have come while somebody looks at the list; the current one stays, wherever it is now. */
  function draw(stay = false) {
    const { sort = null, down, at } = context.query;
    const current = list.row;
    let rows = filtered(data, context.query, search.hits);
    if (sort) rows = sorted(data, rows, sort, down === "1");
    nothing.hidden = rows.length > 0 || (data.count === 0 && trouble.hasChildNodes());
    list.element.hidden = rows.length === 0;
    put(nothing, data.count ? "No rollout matches the filters." : "No rollouts are recorded yet.");
    const place = stay && current !== undefined ? rows.indexOf(current) : Number(at ?? 0);
    list.show(rows, { sort, down: down === "1", place, stay });
    count.textContent = `${number(rows.length)} of ${number(data.count)}${search.told}`;
    document.body.dataset.shown = rows.length;
  }

  async function set(more) {
    context.setQuery({ ...context.query, at: null, ...more });
    await find();
    draw();
  }

  /** Ask for the rows that have the text, if it is another one than before. */
  async function find() {
    const { q, stage } = context.query;
    const wanted = q ? `${stage ?? ""}/${q}` : null;
    if (wanted === search.text) return;
    Object.assign(search, { text: wanted, hits: null, told: "" });
    if (!q) return;
    const found = isExported() ? inSummaries(data, q) : await searched(run.id, q, stage);
    if (search.text === wanted) Object.assign(search, found);
  }

  /** Ask for the rows of one more step that have the text. */
  async function findIn(stage, step) {
    const { text, hits } = search;
    if (!hits || ![undefined, stage].includes(context.query.stage)) return;
    const found = await searched(run.id, context.query.q, stage, step);
    if (search.text !== text) return;
    for (const hit of found.hits) hits.add(hit);
    search.told ||= found.told;
  }

  function distinct(name) {
    return [...new Set(data.columns[name])].filter((one) => one !== null).sort((a, b) => (a < b ? -1 : 1));
  }

  /** What can be chosen from; the bar is drawn again when it is something else. */
  function choices() {
    const stops = [...new Set(data.columns.stop_reason.map((one, n) => one ?? data.columns.finish_reason[n]))]
      .filter(Boolean)
      .sort();
    return { stages: distinct("stage"), sources: distinct("source"), stops };
  }

  function drawBar() {
    const q = context.query;
    const any = (values) => [["", "any"], ...values.map((value) => [String(value), line(value, 40)])];
    const { stages, sources, stops } = choices();
    offered = JSON.stringify({ stages, sources, stops });
    let timer = null;
    const text = h("input", {
      type: "search",
      value: q.q ?? "",
      placeholder: "in prompt, reply, messages  ( / )",
      "aria-label": "search text",
      data: { filter: "q" },
      on: {
        input: () => {
          clearTimeout(timer);
          timer = setTimeout(() => set({ q: text.value || null }), SEARCH_MS);
        },
      },
    });
    const bound = (name, side) =>
      h("input", {
        type: "number",
        step: "any",
        value: q[`${name}_${side}`] ?? "",
        "aria-label": `${name} ${side}`,
        placeholder: side,
        data: { filter: `${name}_${side}` },
        on: { change: (event) => set({ [`${name}_${side}`]: event.target.value || null }) },
      });
    put(
      bar,
      h("label", { class: "field grow" }, h("span", {}, "text"), text),
      select("stage", any(stages), q.stage ?? "", (value) => set({ stage: value || null })),
      sources.length > 1 &&
        select("source", any(sources), q.source ?? "", (value) => set({ source: value || null })),
      select("ended by", any(stops), q.stop ?? "", (value) => set({ stop: value || null })),
      RANGES.map(([name, label]) =>
        h(
          "div",
          { class: "field" },
          h("span", {}, label),
          h("div", { class: "range" }, bound(name, "from"), bound(name, "to")),
        ),
      ),
      FLAGS.map(([name, label]) =>
        select(
          label,
          [
            ["", "any"],
            ["1", "with"],
            ["0", "without"],
          ],
          q[name] ?? "",
          (value) => set({ [name]: value || null }),
        ),
      ),
      q.uid &&
        h("button", { type: "button", on: { click: () => set({ uid: null }).then(drawBar) } }, `task ${q.uid} ×`),
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          data: { act: "clear" },
          on: {
            click: () => {
              context.setQuery({});
              set({}).then(drawBar);
            },
          },
        },
        "clear",
      ),
    );
    context.keys({ "/": () => text.focus() });
  }

  context.keys({
    j: () => list.move(1),
    k: () => list.move(-1),
    Enter: () => list.open(),
    Escape: () => {
      location.hash = hashOf(["run", run.id]);
    },
    g: () => list.move(-1e9),
    G: () => list.move(1e9),
  });
  context.shown = () => {
    draw();
    list.focus();
  };
  let files = fileMarks(run);
  context.update = async (now) => {
    const next = fileMarks(now);
    const fresh = [...next.keys()].filter((mark) => !files.has(mark));
    if (!fresh.length && next.size === files.size) return;
    // Steps that came since are added; if one was written anew, or many came, all are asked for again.
    // So if one cannot be read, which the answer about all says.
    const places = fresh.map((mark) => next.get(mark));
    const asked = ({ stage, step }) => get(address(ofRun(run.id, "rollouts"), { stage, step }));
    const few = next.size === files.size + fresh.length && fresh.length <= MOST_ADDED;
    const answers = few && (await Promise.all(places.map(asked)).catch(() => null));
    if (answers) {
      for (const [n, { stage, step }] of places.entries()) {
        add(data, stage, step, answers[n]);
        await findIn(stage, step);
      }
    } else {
      data = taken(await get(url));
      search.text = null;
      await find();
    }
    files = next;
    if (JSON.stringify(choices()) !== offered && !bar.contains(document.activeElement)) drawBar();
    draw(true);
  };
  drawBar();
  await find();
  draw();
  return [
    trouble,
    bar,
    h(
      "div",
      { class: "bar slim" },
      count,
      h("span", { class: "space" }),
      h("span", { class: "dim" }, "j k move, Enter opens, / searches, Escape leaves"),
    ),
    nothing,
    list.element,
  ];
}

/** Rows that have the text, and what is to be said of the search: whatever goes wrong, no other row is shown. */
async function searched(run, q, stage, step) {
  try {
    const { hits, complete, problems } = await get(address(ofRun(run, "search"), { q, stage, step }));
    const told = [
      complete ? "" : "; the search stopped before it had read everything",
      problems.length ? `; ${number(problems.length)} files could not be searched: ${visible(problems[0])}` : "",
    ];
    return { hits: new Set(hits.map((hit) => hit.join("/"))), told: told.join("") };
  } catch (error) {
    return { hits: new Set(), told: `; the search failed: ${visible(error.message)}` };
  }
}

/** An exported page has no server to ask: it looks into the beginnings of prompts and replies. */
function inSummaries({ columns: c, count }, q) {
  const wanted = q.toLowerCase();
  const hits = new Set();
  for (let n = 0; n < count; n++) {
    if (`${c.prompt[n]}\n${c.text[n]}`.toLowerCase().includes(wanted)) hits.add(`${c.stage[n]}/${c.step[n]}/${c.row[n]}`);
  }
  return { hits, told: "; this exported page has the beginnings of prompts and replies alone" };
}
