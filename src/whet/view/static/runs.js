/* The list of runs, and two of them compared. */

import { firstOf, h, line, number, panel, put, renew, right, select, short, table, tick, visible } from "./dom.js";
import { address, get, getMetrics, shown } from "./api.js";
import { chart, legend } from "./plot.js";
import { hashOf, link, listed, named, rolloutLink } from "./route.js";

const MOST_CHARTS = 8;
const MOST_PAIRS = 200;
const USUAL = [
  "reward/mean",
  "eval/accuracy",
  "train/loss",
  "rollout/tokens_mean",
  "train/entropy_nats",
  "train/grad_norm",
];

/** Metrics to show before anybody has chosen: the usual ones that a run has. */
export function usualMetrics(names, most = 6) {
  const known = USUAL.filter((name) => names.includes(name));
  return (known.length ? known : names).slice(0, most);
}

export async function runsPage(context) {
  const ticked = new Set();
  const [holder, told] = [h("div", {}), h("span", { class: "dim" })];
  const compare = h(
    "button",
    {
      type: "button",
      disabled: true,
      data: { act: "compare" },
      on: {
        click: () => {
          const [a, b] = [...ticked];
          location.hash = hashOf(["compare"], { a, b });
        },
      },
    },
    "Compare two",
  );

  function draw(answer) {
    const mark = (run, on) => {
      if (on) ticked.add(run.id);
      else ticked.delete(run.id);
      compare.disabled = ticked.size !== 2;
    };
    const rows = answer.runs.map((run) => ({
      props: { "data-run": run.id, class: run.state === "damaged" ? "damaged" : null },
      cells: [
        h("input", {
          type: "checkbox",
          "aria-label": `compare ${visible(run.name)}`,
          checked: ticked.has(run.id),
          data: { part: `compare ${run.id}` },
          on: { change: (event) => mark(run, event.target.checked) },
        }),
        h(
          "div",
          {},
          link(["run", run.id], {}, visible(run.name ?? run.path)),
          h("div", { class: "dim path" }, visible(run.path)),
        ),
        h(
          "span",
          {
            class: `badge ${String(run.state).replaceAll(" ", "-")}`,
            data: { state: run.state },
            title: visible(run.error),
          },
          run.state,
        ),
        [run.algorithm].flat().filter(Boolean).map(visible).join(" → ") || "–",
        (run.stages ?? []).map(visible).join(" → ") || "–",
        run.steps_planned ? `${number(run.step)} / ${number(run.steps_planned)}` : number(run.step),
        number(run.reward, 3),
        number(run.held_out, 3),
        short(run.tokens_per_s),
        h("span", { class: run.faults ? "warn" : null }, number(run.faults)),
        visible(run.started_utc ?? "–")
          .replace("T", " ")
          .replace(/\+00:00$/, ""),
      ],
    }));
    put(told, `${answer.runs.length} in view`);
    renew(
      holder,
      answer.runs.length
        ? table(
            [
              { name: "", title: "tick two to compare them" },
              "run",
              "state",
              "algorithm",
              "stages",
              right("step"),
              right("reward", "mean of the newest step"),
              right("held-out", "newest accuracy"),
              right("tokens/s"),
              right("faults", "rollouts that failed"),
              "started (UTC)",
            ],
            rows,
            { "data-table": "runs" },
          )
        : h("p", { class: "dim", data: { empty: "" } }, "There are no runs here."),
      answer.runs
        .filter((run) => run.error)
        .map((run) => h("p", { class: "error" }, `${visible(run.name)}: ${visible(run.error)}`)),
    );
  }

  const answer = await get("api/runs");
  draw(answer);
  context.update = draw;
  return [
    h(
      "div",
      { class: "bar" },
      h("h1", {}, "Runs"),
      told,
      h("span", { class: "space" }),
      compare,
    ),
    answer.exported && h("p", { class: "note", data: { exported: "" } }, visible(answer.exported)),
    holder,
  ];
}

// ---------------------------------------------------------------- two runs

export async function comparePage(context) {
  const { a, b } = context.query;
  const all = (await get("api/runs")).runs;
  const options = all.map((run) => [run.id, visible(run.name ?? run.path)]);
  const other = (name) => (value) => {
    location.hash = hashOf(["compare"], { ...context.query, [name]: value });
  };
  const choose = h(
    "div",
    { class: "bar" },
    h("h1", {}, "Compare"),
    select("first", options, a ?? all[0]?.id, other("a")),
    select("second", options, b ?? all[1]?.id, other("b")),
  );
  const pair = [a ?? all[0]?.id, b ?? all[1]?.id];
  if (pair.includes(undefined)) return [choose, h("p", { class: "note" }, "Two runs are needed.")];
  const told = await get(address("api/compare", { a: pair[0], b: pair[1] }));
  const names = pair.map((id) => visible(all.find((run) => run.id === id)?.name ?? id));
  const first = told.first_difference;
  const config = told.config.length
    ? table(
        ["key", names[0], names[1]],
        told.config.map(([key, one, two]) => [h("code", {}, visible(key)), setting(one), setting(two)]),
        { "data-table": "config" },
      )
    : h("p", { class: "dim" }, "The configs are equal.");
  return [
    choose,
    h(
      "p",
      { class: "note", data: { first: first ? `${first.stage} ${first.step}` : "none" } },
      first
        ? [
            "First difference of the numbers: ",
            h("b", {}, `${visible(first.stage)} step ${first.step}`),
            ", ",
            h("code", {}, visible(first.name)),
            ".",
          ]
        : told.lines
          ? `All numbers that both runs have are equal, in ${number(told.lines)} lines of metrics.jsonl.`
          : "No step is in both records.",
    ),
    panel(`Config: ${told.config.length} keys differ`, {}, config),
    panel("Curves", {}, await shown(() => bothCurves(context, pair, names, told.metrics))),
    panel("Replies to the same task", {}, await replies(context, pair, names)),
  ];
}

function setting(value) {
  return h(
    "code",
    {},
    value === null || value === undefined ? "–" : visible(typeof value === "string" ? value : JSON.stringify(value)),
  );
}

async function bothCurves(context, pair, names, known) {
  const holder = h("div", {});
  const input = h("input", {
    type: "search",
    placeholder: "another metric",
    list: "metric-names",
    "aria-label": "metric",
  });
  const { m } = context.query;
  let chosen = m === undefined ? usualMetrics(known) : named(m).filter((name) => known.includes(name));

  async function draw() {
    const rows = await Promise.all(pair.map((run) => getMetrics(run, chosen)));
    // Stages follow each other: the same place in both runs, as far as their stages have the same names.
    const stages = [...new Set(rows.flatMap((one) => one.stage))];
    const lengths = stages.map((stage) =>
      Math.max(0, ...rows.flatMap((one) => one.step.filter((_, n) => one.stage[n] === stage))),
    );
    const starts = stages.map((_, n) => lengths.slice(0, n).reduce((sum, length) => sum + length, 0));
    const x = rows.map((one) => one.step.map((step, n) => starts[stages.indexOf(one.stage[n])] + step));
    const place = (value) => {
      const n = starts.findLastIndex((start) => value > start || start === 0);
      return `${stages[n]} step ${value - starts[n]}`;
    };
    put(
      holder,
      h(
        "div",
        { class: "charts" },
        chosen.map((name) =>
          h(
            "div",
            {},
            h("h3", {}, visible(name)),
            chart({
              name,
              where: place,
              series: rows.map((one, n) => ({ name: names[n], x: x[n], y: one[name] ?? [] })),
              wholeX: true,
              breaks: stages.map((stage, n) => ({ x: starts[n], text: visible(stage) })),
            }),
          ),
        ),
      ),
    );
  }
  input.addEventListener("change", async () => {
    if (!known.includes(input.value)) return;
    chosen = [input.value, ...chosen.filter((name) => name !== input.value)].slice(0, MOST_CHARTS);
    input.value = "";
    context.setQuery({ ...context.query, m: listed(chosen) });
    await draw();
  });
  await draw();
  return [
    h(
      "div",
      { class: "bar" },
      legend(names),
      input,
      h(
        "datalist",
        { id: "metric-names" },
        known.map((name) => h("option", { value: name })),
      ),
    ),
    holder,
  ];
}

async function replies(context, pair, names) {
  const runs = await Promise.all(pair.map((id) => get(`api/runs/${encodeURIComponent(id)}`)));
  const both = runs[0].rollout_files.filter((file) =>
    runs[1].rollout_files.some((one) => one.stage === file.stage && one.step === file.step),
  );
  if (!both.length) return h("p", { class: "dim" }, "No step has a file of rollouts in both runs.");
  const stages = [...new Set(both.map((file) => file.stage))];
  const stage = stages.includes(context.query.stage) ? context.query.stage : stages[stages.length - 1];
  const steps = both.filter((file) => file.stage === stage).map((file) => file.step);
  const step = steps.includes(Number(context.query.step)) ? Number(context.query.step) : steps[steps.length - 1];
  const go = (query) => {
    location.hash = hashOf(["compare"], { a: pair[0], b: pair[1], m: context.query.m, stage, step, ...query });
  };
  const list = await shown(async () => {
    const { pairs, count } = await get(address("api/compare/replies", { a: pair[0], b: pair[1], stage, step }));
    const only = context.query.only === "differ";
    const kept = only ? pairs.filter((one) => one.differ) : pairs;
    const cell = (reply, run) =>
      reply
        ? [
            h("div", { class: "reply" }, line(reply.text, 300)),
            h(
              "div",
              { class: "dim" },
              `reward ${number(reply.reward, 3)} `,
              reply.row !== undefined && rolloutLink(run, stage, step, reply.row, "open"),
            ),
          ]
        : "–";
    return [
      tick("only different ones", only, (on) => go({ only: on ? "differ" : null })),
      h("p", { class: "dim" }, `${number(kept.length)} of ${number(pairs.length)} pairs`),
      firstOf(pairs.length, count),
      firstOf(Math.min(kept.length, MOST_PAIRS), kept.length),
      table(
        ["task", "prompt", names[0], names[1]],
        kept
          .slice(0, MOST_PAIRS)
          .map((one) => [
            `${one.uid}·${one.index}`,
            line(one.prompt, 160),
            cell(one.a, pair[0]),
            cell(one.b, pair[1]),
          ]),
        { "data-table": "replies" },
      ),
    ];
  });
  return [
    h(
      "div",
      { class: "bar" },
      select("stage", stages, stage, (value) => go({ stage: value, step: null })),
      select(
        "step",
        steps.map((one) => [String(one), String(one)]),
        String(step),
        (value) => go({ step: value }),
      ),
    ),
    list,
  ];
}
