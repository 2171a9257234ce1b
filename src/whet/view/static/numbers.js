/* Pages of numbers over the steps of a stage: rewards, ledger, timeline, mismatch, evaluations. */

import { firstOf, h, line, number, panel, renew, right, select, table, visible } from "./dom.js";
import { address, failure, get, getMetrics, ofRun, shown } from "./api.js";
import { css, diverging, ink } from "./color.js";
import { lanesChart } from "./lanes.js";
import { chart, histogram, legend } from "./plot.js";
import { hashOf, link, rolloutLink, stageNames, stageOf } from "./route.js";

const QUANTILES = ["min", "p10", "p25", "p50", "p75", "p90", "max"];
const MOST_LISTED = 200;
const ASKED = "requested";
const NOT_ROLLOUTS = /calls|replies|results/;
const LOSSES = /drop|fail|fault|without|malformed|cut|retr|abort/;
const nothing = (said) => h("p", { class: "note", data: { empty: "" } }, said);

/** In the place of a stage: the record has none yet, or cannot be read. */
function noStages(run) {
  const problems = run.problems ?? [];
  if (!problems.length) return nothing("The run has no stages yet.");
  return problems.map(failure);
}

/** A page: its head, and what `make` gives, again when the run goes on. */
async function livePage(context, head, make) {
  const holder = h("div", {});
  context.update = async () => renew(holder, await shown(make));
  await context.update();
  return [h("div", { class: "bar" }, head), holder];
}

/** A page about one stage: its selection, and what `make` gives for it. */
function stagePage(context, title, told, make) {
  const { run } = context;
  const stage = stageOf(run, context.query);
  const go = (value) => {
    location.hash = hashOf(["run", run.id, context.name], { stage: value });
  };
  const head = [
    h("h2", {}, title),
    stageNames(run).length > 1 && select("stage", stageNames(run), stage, go),
    h("span", { class: "dim" }, told),
  ];
  return livePage(context, head, () => (stage === null ? noStages(run) : make(stage)));
}

// ---------------------------------------------------------------- rewards

export function rewardsPage(context) {
  return stagePage(
    context,
    "Rewards",
    "areas: 10th to 90th, and 25th to 75th percentile of the rollouts",
    async (stage) => {
      const told = await get(address(ofRun(context.run.id, "rewards"), { stage }));
      const unread = (told.problems ?? []).map(failure);
      if (!told.steps?.length || !Object.values(told.parts ?? {}).some((part) => part.count?.some((n) => n > 0))) {
        return [
          unread,
          nothing(
            `The rollouts of ${visible(stage)} have no rewards: it learns from demonstrations, or none are scored yet.`,
          ),
        ];
      }
      const distribution = ([name, part]) =>
        h("div", {}, h("h3", {}, visible(name)), spread(name, told.steps, part, context.run.id, stage));
      const sources = Object.entries(told.sources ?? {});
      return [
        unread,
        panel(
          "Reward and held-out accuracy",
          { data: { radar: "" } },
          h(
            "p",
            { class: "dim" },
            "A reward that rises while the held-out accuracy does not is a sign of reward hacking.",
          ),
          await shown(() => besideHeldOut(context.run, stage)),
        ),
        panel(
          "Distribution of each part",
          {},
          legend(["median", "mean"]),
          h("div", { class: "charts" }, Object.entries(told.parts).map(distribution)),
        ),
        sources.length > 1 &&
          panel("Total reward by source", {}, h("div", { class: "charts" }, sources.map(distribution))),
        (told.correlation?.names ?? []).length > 1 &&
          panel("Correlation of the parts", {}, correlation(told.correlation)),
        panel(
          "Extremes",
          {},
          h(
            "div",
            { class: "columns" },
            extremes(context.run.id, stage, "best", told.extremes?.best),
            extremes(context.run.id, stage, "worst", told.extremes?.worst),
          ),
        ),
        told.ngrams &&
          panel(
            "Words that high- and low-reward replies repeat",
            { data: { ngrams: "" } },
            h("p", { class: "dim" }, visible(told.ngrams.of ?? "")),
            h(
              "div",
              { class: "columns" },
              ngrams("more in winners", told.ngrams.winners),
              ngrams("more in losers", told.ngrams.losers),
            ),
          ),
      ];
    },
  );
}

/** Mean reward and held-out accuracy of a stage. */
async function besideHeldOut(run, stage) {
  const wanted = ["reward/mean", "eval/accuracy"].filter((name) => (run.metric_names ?? []).includes(name));
  if (wanted.length < 2) return h("p", { class: "dim" }, "The run has no evaluations to compare with.");
  const rows = await getMetrics(run.id, wanted);
  const own = rows.step.map((_, n) => n).filter((n) => rows.stage[n] === stage);
  const series = wanted.map((name) => ({ name, x: own.map((n) => rows.step[n]), y: own.map((n) => rows[name][n]) }));
  return [legend(wanted), chart({ name: wanted.join(", "), series, wholeX: true })];
}

function spread(name, steps, part, run, stage) {
  const at = (label) => part.quantiles.map((values) => values?.[QUANTILES.indexOf(label)] ?? null);
  return chart({
    name,
    wholeX: true,
    series: [
      { name: "median", x: steps, y: at("p50") },
      { name: "mean", x: steps, y: part.mean },
    ],
    bands: [
      { x: steps, low: at("p10"), high: at("p90") },
      { x: steps, low: at("p25"), high: at("p75") },
    ],
    open: (step) => {
      location.hash = hashOf(["run", run, "rollouts"], { stage, step_from: step, step_to: step });
    },
  });
}

function correlation({ names, values }) {
  const cell = (value) => {
    const element = h("span", { class: "cell" }, number(value, 2));
    if (value !== null && value !== undefined) {
      element.style.backgroundColor = css(diverging(value));
      element.style.color = ink(diverging(value));
    }
    return element;
  };
  return table(
    ["", ...names.map((name) => right(visible(name)))],
    names.map((name, n) => [visible(name), ...values[n].map(cell)]),
    { class: "heat narrow", "data-table": "correlation" },
  );
}

function extremes(run, stage, name, list = []) {
  return h(
    "div",
    {},
    h("h3", {}, name),
    table(
      ["rollout", right("reward"), "reply"],
      list.map(([step, row, reward, text]) => [rolloutLink(run, stage, step, row), number(reward), line(text, 100)]),
      { "data-table": name },
    ),
  );
}

function ngrams(title, list = []) {
  return h(
    "div",
    {},
    h("h3", {}, title),
    list.length
      ? table(
          ["words", right("winners"), right("losers")],
          list.map(([text, won, lost]) => [h("code", {}, line(text, 80)), won, lost]),
        )
      : h("p", { class: "dim" }, "none"),
  );
}

// ---------------------------------------------------------------- ledger

export function ledgerPage(context) {
  const { run } = context;
  const how = "requested = trained on + dropped + failed + pending; a count opens its recorded rollouts";
  return livePage(context, [h("h2", {}, "Ledger"), h("span", { class: "dim" }, how)], async () => {
    const told = await get(ofRun(run.id, "ledger"));
    return told.stages.length
      ? told.stages.map((stage) => ledgerOf(run.id, stage, told.filters ?? {}))
      : nothing("No step has been recorded yet.");
  });
}

function ledgerOf(run, { stage, steps, counts, totals }, filters) {
  const names = Object.keys(totals);
  const filter = (name, more = {}) => {
    if (filters[name] === null || filters[name] === undefined) return null;
    return { stage, ...Object.fromEntries(new URLSearchParams(filters[name])), ...more };
  };
  const count = (name, value, more) => {
    const query = filter(name, more);
    return query && value ? link(["run", run, "rollouts"], query, number(value)) : number(value);
  };
  const drawn = names.filter((name) => totals[name] && !/pending/.test(name));
  return panel(
    visible(stage),
    { data: { ledger: stage } },
    table(
      ["account", right("count"), right("share of rollouts")],
      names.map((name) => [
        visible(name),
        h("span", { data: { total: name } }, count(name, totals[name])),
        totals[ASKED] && !NOT_ROLLOUTS.test(name) ? `${number((100 * totals[name]) / totals[ASKED], 3)} %` : "–",
      ]),
      { "data-table": "ledger", class: "narrow" },
    ),
    drawn.length > 0 &&
      steps.length > 1 && [
        legend(drawn.slice(0, 8).map(visible)),
        chart({
          name: `ledger of ${stage}`,
          height: 180,
          wholeX: true,
          series: drawn.slice(0, 8).map((name) => ({ name, x: steps, y: counts[name] })),
          yLabel: "rollouts",
          open: (step) => {
            location.hash = hashOf(["run", run, "rollouts"], { stage, step_from: step, step_to: step });
          },
        }),
      ],
    h("details", { data: { part: `steps ${stage}` } }, h("summary", {}, "by step"), perStep(steps, names, counts, count)),
  );
}

/** Newest first; of many steps those where something other than training happened come with the newest. */
function perStep(steps, names, counts, count) {
  const most = 200;
  const order = steps.map((_, n) => n).reverse();
  const odd = order.filter((n) => names.some((name) => LOSSES.test(name) && counts[name]?.[n] > 0));
  const kept = order.length > most ? [...new Set([...odd, ...order])].slice(0, most) : order;
  return [
    kept.length < order.length &&
      h("p", { class: "dim" }, `${most} of ${number(order.length)} steps: those with losses first`),
    table(
      [right("step"), ...names.map((name) => right(visible(name)))],
      kept.map((n) => [
        number(steps[n]),
        ...names.map((name) => count(name, counts[name]?.[n], { step_from: steps[n], step_to: steps[n] })),
      ]),
    ),
  ];
}

// ---------------------------------------------------------------- timeline

export function timelinePage(context) {
  const how = "drag or + − ← → zoom and move, a double click shows everything";
  return livePage(context, [h("h2", {}, "Timeline"), h("span", { class: "dim" }, how)], async () => {
    const told = await get(ofRun(context.run.id, "timeline"));
    if (!told.lanes.length)
      return nothing("The run has written no timeline yet.");
    const bubble = told.bubble ?? { columns: [], rows: [] };
    return [
      panel("What each process did, and when it waited", {}, lanesChart(told.lanes, told.seconds)),
      bubble.rows.length > 0 &&
        panel(
          "Bubble: the share of the processes' time in which they waited",
          {},
          table(
            bubble.columns.map((name, n) =>
              bubble.rows.some((row) => typeof row[n] === "number") ? right(visible(name)) : visible(name),
            ),
            bubble.rows.map((row) => row.map((one) => (typeof one === "string" ? visible(one) : one))),
            { "data-table": "bubble" },
          ),
        ),
    ];
  });
}

// ---------------------------------------------------------------- mismatch

export function mismatchPage(context) {
  return stagePage(
    context,
    "Mismatch",
    "between the log-probs of the engine that samples and those of the trainer, before the update",
    async (stage) => {
      const told = await get(address(ofRun(context.run.id, "mismatch"), { stage }));
      const unread = (told.problems ?? []).map(failure);
      const note = told.note && h("p", { class: "note" }, visible(told.note));
      if (!told.steps?.length)
        return [unread, note || nothing("No step of this stage has sampled tokens.")];
      const totals = (told.counts ?? []).reduce((sum, counts) => counts.map((count, n) => count + (sum[n] ?? 0)), []);
      const drawn = [
        ["mean", told.mean],
        ["p99", told.p99],
        ["max", told.max],
      ].filter(([, values]) => values?.some((value) => value !== null));
      return [
        unread,
        note,
        panel(
          "Absolute difference, nats",
          { data: { mismatch: told.steps.length } },
          legend(drawn.map(([name]) => name)),
          chart({
            name: "mismatch",
            wholeX: true,
            height: 220,
            yLabel: "nats",
            series: drawn.map(([name, y]) => ({ name, x: told.steps, y })),
            open: (step) => {
              location.hash = hashOf(["run", context.run.id, "rollouts"], { stage, step_from: step, step_to: step });
            },
          }),
        ),
        totals.some((count) => count > 0) &&
          panel(
            "Sampled tokens by difference, all recorded steps",
            {},
            histogram({ name: "tokens by difference", edges: told.edges, counts: totals, xLabel: "nats", log: true }),
          ),
        told.worst &&
          panel(
            "Tokens with the largest differences",
            {},
            told.worst.length
              ? table(
                  ["rollout", right("place"), "token", right("trainer minus sampler, nats")],
                  told.worst.map(([step, row, place, text, difference]) => [
                    row === null
                      ? `${visible(stage)} ${step}`
                      : link(
                          ["run", context.run.id, "rollout", stage, step, row],
                          { view: "tokens", color: "difference" },
                          `${visible(stage)} ${step}/${row}`,
                        ),
                    place,
                    h("code", {}, visible(text)),
                    number(difference),
                  ]),
                  { "data-table": "worst" },
                )
              : h("p", { class: "dim" }, "none differ"),
          ),
      ];
    },
  );
}

// ---------------------------------------------------------------- evaluations

export function evaluationsPage(context) {
  const { run, query } = context;
  return livePage(context, h("h2", {}, "Evaluations"), async () => {
    const told = await get(ofRun(run.id, "evals"));
    if (!told.rows.length && !told.files.length)
      return nothing("The run has not evaluated yet.");
    return [
      curves(told),
      panel(
        "Numbers",
        {},
        table(
          ["stage", right("step"), "source", ...told.columns.map((name) => right(visible(name)))],
          told.rows
            .slice()
            .reverse()
            .map(([stage, step, source, ...values]) => [
              visible(stage),
              number(step),
              visible(source),
              ...values.map((value) => number(value)),
            ]),
          { "data-table": "evals" },
        ),
      ),
      await flips(run, told.files, query),
    ];
  });
}

/** A chart of each number; a curve for each source, over the steps of all stages. */
function curves(told) {
  const stages = told.stages.map(([stage]) => stage);
  const sources = [...new Set(told.rows.map((row) => row[2]))];
  const starts = [];
  told.stages.reduce((start, [, steps]) => {
    starts.push(start);
    return start + steps;
  }, 0);
  const where = (x) => {
    const n = starts.findLastIndex((start) => x > start || start === 0);
    return `${visible(stages[n])} step ${x - starts[n]}`;
  };
  const charts = told.columns.map((name, n) => {
    const series = sources.map((source) => {
      const rows = told.rows.filter((row) => row[2] === source);
      return {
        name: String(source),
        x: rows.map((row) => starts[stages.indexOf(row[0])] + row[1]),
        y: rows.map((row) => row[3 + n]),
      };
    });
    return h(
      "div",
      {},
      h("h3", {}, visible(name)),
      chart({
        name,
        series,
        where,
        wholeX: true,
        breaks: stages.map((stage, k) => ({ x: starts[k], text: visible(stage) })),
      }),
    );
  });
  return panel(
    "Over the steps",
    {},
    sources.length > 1 && legend(sources.map(visible)),
    h("div", { class: "charts" }, charts),
  );
}

async function flips(run, files, query) {
  if (files.length < 2) return null;
  const names = [...new Set(files.map((file) => file.stage))];
  const stage = names.includes(query.stage) ? query.stage : names[names.length - 1];
  const steps = files
    .filter((file) => file.stage === stage)
    .map((file) => file.step)
    .sort((a, b) => a - b);
  const [from, to] = [
    Number(query.from ?? steps[steps.length - 2] ?? steps[0]),
    Number(query.to ?? steps[steps.length - 1]),
  ];
  const go = (more) => {
    location.hash = hashOf(["run", run.id, "evals"], { stage, from, to, ...more });
  };
  const texts = steps.map((step) => [String(step), String(step)]);
  const lists = await shown(async () => {
    const told = await get(address(ofRun(run.id, "evals", "flips"), { stage, from, to }));
    const reply = (one, step, side) =>
      h(
        "div",
        { class: "reply" },
        line(typeof one[side] === "object" ? one[side]?.text : one[side], 160),
        " ",
        one[`row_${side}`] !== undefined &&
          h("a", { href: hashOf(["run", run.id, "rollout", stage, step, one[`row_${side}`]], { of: "eval" }) }, "open"),
      );
    const list = (name, rows) =>
      h(
        "div",
        {},
        h("h3", { data: { flips: name, count: told.counts[name] } }, `${name}: ${number(told.counts[name])}`),
        firstOf(Math.min(rows.length, MOST_LISTED), told.counts[name]),
        table(
          ["task", "prompt", "answer", `step ${from}`, `step ${to}`],
          rows
            .slice(0, MOST_LISTED)
            .map((one) => [
              number(one.uid),
              line(one.prompt, 100),
              h("code", {}, line(typeof one.answer === "string" ? one.answer : JSON.stringify(one.answer), 60)),
              reply(one, from, "before"),
              reply(one, to, "after"),
            ]),
        ),
      );
    return [list("mended", told.mended), list("broken", told.broken)];
  });
  return panel(
    "Flips: tasks whose result changed between two evaluations",
    {},
    h(
      "div",
      { class: "bar" },
      names.length > 1 &&
        select("stage", names, stage, (value) => {
          location.hash = hashOf(["run", run.id, "evals"], { stage: value });
        }),
      select("from step", texts, String(from), (value) => go({ from: value })),
      select("to step", texts, String(to), (value) => go({ to: value })),
    ),
    lists,
  );
}
