/* What stands beside the form: the plan, the report of an import, the log of a run. */

import { facts, h, number, table, visible } from "./dom.js";

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** A number of bytes as people write it. */
export function size(bytes) {
  let [value, n] = [bytes, 0];
  while (value >= 1024 && n < UNITS.length - 1) [value, n] = [value / 1024, n + 1];
  return `${number(value, 3)} ${UNITS[n]}`;
}

/** What `whet plan` prints. */
export function planPane(check) {
  if (!check.plan) return h("p", { class: "dim" }, "The plan appears once the config has no errors.");
  const { stages, notes } = check.plan;
  const labels = Object.keys(stages[0].facts);
  const rows = labels.map((label) => ({ cells: [label, ...stages.map((stage) => visible(stage.facts[label]))], props: { data: { fact: label } } }));
  return h("div", { class: "plan" }, check.notes.map((note) => h("p", { class: "note" }, visible(note))), notes.map((note) => h("p", { class: "note" }, visible(note))),
    table(["", ...stages.map((stage) => visible(stage.name))], rows), stages.map((stage) => memoryOf(stage, stages.length > 1)));
}

function memoryOf(stage, named) {
  if (!stage.memory.length) return null;
  return h("section", {}, h("h2", {}, named ? `Memory of ${visible(stage.name)}` : "Memory"), stage.memory.map((place) => h("div", {},
    h("h3", {}, `${place.process}${place.count > 1 ? ` (${place.count} of them)` : ""}`), place.phases.map((phase) => phaseOf(phase, stage.limit)))));
}

function phaseOf(phase, limit) {
  const parts = Object.entries(phase.parts).filter(([, bytes]) => bytes).sort(([, a], [, b]) => b - a);
  const whole = Math.max(limit, phase.total);
  return h("div", { data: { phase: phase.name } }, h("div", {}, `${phase.name}: ${size(phase.total)} of ${size(limit)}`),
    h("div", { class: `memory${phase.total > limit ? " over" : ""}` }, parts.map(([name, bytes]) => h("span", { title: `${name}: ${size(bytes)}`,
      style: { width: `${(100 * bytes) / whole}%` } }))), h("div", { class: "dim status" }, parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", ")));
}

/** What became of each key of another system's file. */
export function reportPane(report, go) {
  const head = facts([["system", `${report.dialect}${report.version ? ` ${report.version}` : ""}`], ...Object.entries(report.counts)]);
  const rows = report.lines.map((line) => ({ props: { data: { status: line.status } }, cells: [
    [h("code", {}, visible(line.key)), h("code", { class: "dim" }, visible(line.value))],
    [h("span", { class: `status ${line.status}` }, line.given ? line.status : `${line.status} (default)`),
      line.native.map((key) => h("button", { type: "button", class: "line", on: { click: () => go(key) } }, visible(key)))],
    [visible(line.said), line.differs && h("p", { class: "why" }, `differs: ${visible(line.differs)}`)]] }));
  return h("div", {}, head, report.summary.slice(1).map((text) => h("p", { class: "note" }, visible(text))),
    table(["key and value", "becomes", "what happens"], rows, { class: "report" }));
}

/** What `whet explain KEY` prints. */
export function explanation(told) {
  const rows = (cells) => (cells.length ? table(cells[0].map(() => ""), cells.map((row) => row.map(visible))) : null);
  return h("div", { class: "explained" }, h("h2", {}, visible(told.key)), h("p", {}, visible(told.meaning)),
    facts([["type", told.type], ["default", told.default], ["where", told.where], ["read when", told.read_when], ["source", told.source]]), rows(told.value));
}

/** The log of a run: an element that follows the server's answers. `add(job)`, `element`, `text`. */
export function logPane(view) {
  const head = h("p", { data: { job: "" } });
  const text = h("pre", { data: { log: "" }, tabindex: 0, "aria-label": "log" });
  const viewer = h("button", { type: "button", on: { click: view } }, "Open whet view of the run");
  const element = h("div", { class: "log-pane" }, h("div", { class: "bar" }, head, viewer), text);
  return {
    element,
    clear: () => { text.textContent = ""; },
    add(job) {
      const atEnd = text.scrollTop + text.clientHeight > text.scrollHeight - 40;
      if (job.log) text.append(visible(job.log.replace(/\u001b\[[0-9;?]*[A-Za-z]/g, "").replace(/\r\n?/g, "\n")));
      if (atEnd) text.scrollTop = text.scrollHeight;
      const end = job.exit_code === null ? "runs" : job.exit_code === 0 ? "finished" : `ended with exit code ${job.exit_code}`;
      head.textContent = `whet ${job.command} ${visible(job.file)}: ${end}`;
      head.dataset.job = job.exit_code === null ? "running" : String(job.exit_code);
      viewer.hidden = !job.writes_run;
    },
  };
}
