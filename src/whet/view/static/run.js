/* One run: is it learning, its curves, its stages, what it waits for or ended by, its last log lines, its config. */

import { command, duration, facts, firstOf, h, number, panel, put, renew, right, select, short, table, tick, visible } from "./dom.js";
import { getMetrics, shown } from "./api.js";
import { chart, legend } from "./plot.js";
import { hashOf, link, listed, named, stageNames } from "./route.js";
import { usualMetrics } from "./runs.js";

const FAILED = "rollout/failed_count";
const MOST_CHECKPOINTS = 8;
const SMOOTHINGS = [
  ["0", "none"],
  ["0.6", "light"],
  ["0.9", "strong"],
  ["0.97", "very strong"],
];

export async function runPage(context) {
  const [top, side, log] = [h("div", {}), h("div", { class: "columns" }), h("div", {})];
  const curves = curvesPanel(context);
  const drawFacts = (run) => {
    renew(top, ended(run), problems(run), waits(run), facts(headline(run)), learning(run));
    renew(side, stages(run), checkpoints(run), evaluationsOf(run));
    renew(log, logTail(run));
  };
  drawFacts(context.run);
  await curves.draw();
  context.update = async (run) => {
    drawFacts(run);
    await curves.draw(renew);
  };
  return [top, curves.element, side, log, configPanel(context.run), startPanel(context.run)];
}

function headline(run) {
  const last = run.manifest ?? {};
  const tokens = (run.stages ?? []).reduce((sum, stage) => sum + (stage.tokens ?? 0), 0);
  const seconds = (run.stages ?? []).reduce((sum, stage) => sum + (stage.seconds ?? 0), 0);
  return [
    ["tokens", short(tokens)],
    ["time in steps", duration(seconds)],
    ["seed", last.seed],
    [
      "started (UTC)",
      last.started_utc &&
        visible(last.started_utc)
          .replace("T", " ")
          .replace(/\+00:00$/, ""),
    ],
    [
      "machine",
      [last.host, last.cpu, last.gpu]
        .flat()
        .filter((one) => typeof one === "string")
        .map(visible)
        .join(", "),
    ],
    ["whet", last.packages?.whet],
    ["torch", last.packages?.torch],
  ];
}

/** The error that ended the run, as `whet show` says it. */
function ended(run) {
  if (!run.ended_by) return null;
  return panel("Ended by an error", { class: "bad", data: { ended: "" } }, h("p", { class: "said" }, visible(run.ended_by)));
}

function problems(run) {
  return (run.problems ?? []).length
    ? h(
        "section",
        { class: "panel bad", "aria-label": "problems", data: { problems: run.problems.length } },
        h("h2", {}, "Files that could not be read"),
        h(
          "ul",
          {},
          run.problems.map((text) => h("li", {}, visible(text))),
        ),
      )
    : null;
}

function waits(run) {
  if (!(run.waits ?? []).length) return null;
  return panel(
    "Waiting for",
    { data: { waits: run.waits.length } },
    table(
      ["process", "what", right("since")],
      run.waits.map((one) => [visible(one.process), visible(one.what), duration(one.since_s)]),
    ),
  );
}

function learning(run) {
  const told = (run.stages ?? []).filter((stage) => stage.learning);
  if (!told.length) return null;
  return panel(
    "Is it learning?",
    { data: { learning: "" } },
    told.map((stage) =>
      h(
        "div",
        { class: "verdict" },
        h("b", {}, visible(stage.name)),
        h("span", {}, visible(stage.learning.trend ?? "")),
        (stage.learning.signs ?? []).map((sign) =>
          h(
            "details",
            { open: true, class: "sign", data: { part: `sign ${stage.name} ${sign.name}` } },
            h("summary", {}, h("span", { class: "warn" }, `▲ ${visible(sign.name)}`)),
            h("p", {}, visible(sign.text)),
          ),
        ),
      ),
    ),
  );
}

function stages(run) {
  const change = (from, to) => ((from ?? to ?? null) === null ? "–" : `${number(from, 3)} → ${number(to, 3)}`);
  if (!(run.stages ?? []).length) return panel("Stages", {}, h("p", { class: "dim" }, "No stage has begun."));
  return panel(
    "Stages",
    {},
    table(
      ["stage", "algorithm", right("steps"), right("time"), right("tokens"), right("reward"), right("held-out")],
      (run.stages ?? []).map((stage) => [
        visible(stage.name),
        visible(stage.algorithm ?? "–"),
        stage.steps_planned ? `${number(stage.steps)} / ${number(stage.steps_planned)}` : stage.steps,
        duration(stage.seconds),
        short(stage.tokens),
        change(stage.reward_from, stage.reward_to),
        change(stage.held_out_from, stage.held_out_to),
      ]),
      { "data-table": "stages" },
    ),
  );
}

function checkpoints(run) {
  if (!(run.checkpoints ?? []).length) return null;
  return panel(
    "Checkpoints to continue from",
    {},
    firstOf(Math.min(run.checkpoints.length, MOST_CHECKPOINTS), run.checkpoints.length),
    run.checkpoints
      .slice(0, MOST_CHECKPOINTS)
      .map((one) =>
        h("div", { class: "checkpoint" }, h("b", {}, `${visible(one.stage)} step ${one.step}`), command(one.command)),
      ),
  );
}

function evaluationsOf(run) {
  const files = run.rollout_files ?? [];
  if (!files.length) return null;
  const rows = files.reduce((sum, file) => sum + (file.rows ?? 0), 0);
  const bytes = files.reduce((sum, file) => sum + (file.bytes ?? 0), 0);
  return panel(
    "Records",
    {},
    facts([
      ["rollouts", link(["run", run.id, "rollouts"], {}, number(rows))],
      ["files", number(files.length)],
      ["size", `${short(bytes)}B`],
      ["evaluations", link(["run", run.id, "evals"], {}, number((run.eval_files ?? []).length))],
    ]),
  );
}

function logTail(run) {
  return panel(
    "Last lines of the log",
    {},
    (run.log_tail ?? []).length
      ? h(
          "div",
          { class: "log", tabindex: 0, data: { log: "", part: "log" } },
          h(
            "pre",
            {},
            run.log_tail.map((text) =>
              h("div", { class: / (WARNING|ERROR) /.test(text) ? "warn" : null }, visible(text)),
            ),
          ),
        )
      : h("p", { class: "dim" }, "No log yet."),
  );
}

function configPanel(run) {
  const changes = run.changes ?? [];
  return h(
    "details",
    { class: "panel" },
    h("summary", {}, "Config"),
    changes.length > 0 &&
      table(
        ["stage", "step", "key", "before", "after"],
        changes.map((one) => [
          visible(one.stage),
          one.step,
          visible(one.key),
          visible(JSON.stringify(one.old)),
          visible(JSON.stringify(one.new)),
        ]),
      ),
    h("pre", { tabindex: 0, data: { config: "" } }, visible(run.config_yaml ?? "none")),
  );
}

function startPanel(run) {
  return Object.keys(run.manifest ?? {}).length
    ? h(
        "details",
        { class: "panel" },
        h("summary", {}, "The last start: packages, machine, code"),
        h("pre", { tabindex: 0 }, visible(JSON.stringify(run.manifest, null, 2))),
      )
    : null;
}

// ---------------------------------------------------------------- curves

/** Curves over the steps of all stages or of one. Which, and how, is in the address. */
function curvesPanel(context) {
  const names = () => context.run.metric_names ?? [];
  const holder = h("div", { class: "charts" });
  const chips = h("div", { class: "chips" });
  const query = () => context.query;
  const chosen = () =>
    query().m === undefined
      ? usualMetrics(names())
      : named(query().m).filter((name) => names().includes(name));
  const set = async (more) => {
    context.setQuery({ ...query(), ...more });
    await draw();
  };
  const input = h("input", {
    type: "search",
    list: "metrics",
    placeholder: "add a metric",
    "aria-label": "add a metric",
    data: { add: "metric" },
  });
  const options = h("datalist", { id: "metrics" });
  input.addEventListener("change", () => {
    const wanted = input.value.trim();
    // A whole name, or a part of names: all that have it.
    const found = names().includes(wanted)
      ? [wanted]
      : names()
          .filter((name) => wanted && name.includes(wanted))
          .slice(0, 12);
    input.value = "";
    if (found.length) set({ m: listed([...found, ...chosen().filter((name) => !found.includes(name))]) });
  });
  const controls = h("div", { class: "bar" });
  const element = panel("Curves", { class: "curves" }, controls, chips, holder);

  /** replace: `put` for curves that the user asks for, `renew` for those that he looks at. */
  async function draw(replace = put) {
    const { one, log, smooth = "0", stage = "all" } = query();
    put(
      options,
      names().map((name) => h("option", { value: name })),
    );
    if (!controls.firstChild) {
      put(
        controls,
        input,
        options,
        select("stage", [["all", "all, one after the other"], ...stageNames(context.run)], stage, (value) =>
          set({ stage: value === "all" ? null : value, zoom: null }),
        ),
        select("smoothing", SMOOTHINGS, smooth, (value) => set({ smooth: value === "0" ? null : value })),
        tick("log scale", log === "1", (on) => set({ log: on ? "1" : null })),
        tick("in one chart", one === "1", (on) => set({ one: on ? "1" : null })),
        h("span", { class: "dim" }, "drag to zoom, double click for all"),
      );
    }
    put(
      chips,
      chosen().map((name) =>
        h(
          "span",
          { class: "chip" },
          visible(name),
          h(
            "button",
            {
              type: "button",
              "aria-label": `remove ${visible(name)}`,
              data: { remove: name },
              on: {
                click: () =>
                  set({ m: listed(chosen().filter((other) => other !== name)) }),
              },
            },
            "×",
          ),
        ),
      ),
    );
    const wanted = chosen();
    const content = await shown(async () => {
      const rows = await getMetrics(context.run.id, [
        ...new Set([...wanted, ...(names().includes(FAILED) ? [FAILED] : [])]),
      ]);
      const axis = stepsOf(context.run, rows, stage);
      const [from, to] = (query().zoom ?? "").split("-").map(Number);
      const common = {
        ...axis,
        log: log === "1",
        smooth: Number(smooth),
        wholeX: true,
        zoom: to > from ? [from, to] : null,
        zoomed: (range) =>
          context.setQuery({ ...query(), zoom: range ? range.map((value) => value.toFixed(1)).join("-") : null }),
        open: (value) => {
          const at = axis.place(value);
          if (at && (context.run.rollout_files ?? []).some((file) => file.stage === at.stage && file.step === at.step))
            location.hash = hashOf(["run", context.run.id, "rollouts"], {
              stage: at.stage,
              step_from: at.step,
              step_to: at.step,
            });
        },
      };
      const series = wanted.map((name) => ({ name, ...axis.pick(rows[name] ?? []) }));
      if (!wanted.length) return h("p", { class: "dim" }, names().length ? "No metric is chosen." : "No metrics yet.");
      if (one === "1")
        return h(
          "div",
          { class: "wide" },
          legend(wanted),
          chart({ ...common, name: wanted.join(", "), series, height: 320 }),
        );
      return series.map((single) =>
        h("div", {}, h("h3", {}, visible(single.name)), chart({ ...common, name: single.name, series: [single] })),
      );
    });
    replace(holder, content);
  }
  return { element, draw };
}

/** The steps of a stage, or of all stages one after the other: where values lie, where stages begin, which steps had
 * failures. */
function stepsOf(run, rows, stage) {
  const all = stageNames(run).filter((name) => stage === "all" || name === stage);
  const starts = new Map();
  let end = 0;
  for (const name of all) {
    starts.set(name, end);
    for (let n = 0; n < rows.step.length; n++)
      if (rows.stage[n] === name) end = Math.max(end, starts.get(name) + rows.step[n]);
  }
  const order = rows.step.map((_, n) => n).filter((n) => starts.has(rows.stage[n]));
  const at = (n) => starts.get(rows.stage[n]) + rows.step[n];
  order.sort((a, b) => all.indexOf(rows.stage[a]) - all.indexOf(rows.stage[b]) || rows.step[a] - rows.step[b]);
  const place = (x) => {
    const name = all.findLast((one) => x > starts.get(one) || starts.get(one) === 0);
    return name === undefined ? null : { stage: name, step: x - starts.get(name) };
  };
  return {
    place,
    where: (x) => {
      const found = place(x);
      return found ? `${visible(found.stage)} step ${number(found.step)}` : number(x);
    },
    pick: (values) => ({ x: order.map(at), y: order.map((n) => values[n]) }),
    breaks: all.length > 1 ? all.map((name) => ({ x: starts.get(name), text: visible(name) })) : [],
    marks: order
      .filter((n) => rows[FAILED]?.[n] > 0)
      .map((n) => ({ x: at(n), text: `${number(rows[FAILED][n])} rollouts failed` })),
  };
}
