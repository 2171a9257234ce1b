/* The page: one text, and what the form, the checker and the runs make of it. Every change goes through the text. */

import { choice, h, put, select, tick, visible } from "./dom.js";
import { ask, tell, useToken } from "./ask.js";
import { form, isSingle } from "./form.js";
import { explanation, logPane, planPane, reportPane } from "./panes.js";
import { at, count, dotted, entriesOf, same, sectionOf } from "./tree.js";

const CHECK_MS = 300;
const POLL_MS = 1000;
const MOST_UNDONE = 200;
const find = (id) => document.getElementById(id);

/** saved: the text of the file; begun: the text that was opened or saved last. Both as the editor has them, with \n alone. */
const state = { schema: null, variants: null, opened: null, saved: "", begun: "", tree: {}, lines: new Map(), undone: [], report: null, job: null,
  check: { problems: [], notes: [], stages: [], plan: null, lines: [] },
  scope: null, section: null, level: "beginner", onlySet: false, query: "", pane: "YAML" };
const editor = h("textarea", { id: "yaml", spellcheck: "false", "aria-label": "YAML of the config", wrap: "off" });
const gutter = h("pre", { "aria-hidden": "true" });
const editorPane = h("div", { class: "editor" }, gutter, editor);
const log = logPane(openViewer);
let queue = Promise.resolve();

// ---------------------------------------------------------------- the text

/** One thing after the other: a later one sees the text that the one before left. */
function later(work) {
  queue = queue.then(work).catch((error) => say(error.message, true));
  return queue;
}

/** Change the text by edits of keys; what is typed into the text meanwhile is kept. */
function edit(edits) {
  return later(async () => {
    for (;;) {
      const before = editor.value;
      const told = await tell("edit", { text: before, name: state.opened.path, edits });
      if (editor.value !== before) continue;
      setText(told.text, before);
      use(told.check);
      if (told.rewritten) say(`${told.rewritten === "." ? "The whole text" : told.rewritten} was rewritten, and its comments are lost. Undo restores them.`);
      return;
    }
  });
}

/** Check the text as it is. */
function check() {
  return later(async () => {
    const text = editor.value;
    const found = await tell("check", { text, name: state.opened.path });
    if (editor.value === text) use(found);
  });
}

function setText(text, before) {
  if (text === editor.value) return;
  if (before !== undefined) {
    state.undone.push(before);
    if (state.undone.length > MOST_UNDONE) state.undone.shift();
  }
  const [start, top] = [editor.selectionStart, editor.scrollTop];
  editor.value = text;
  editor.setSelectionRange(start, start);
  editor.scrollTop = top;
}

/** What the checker says of the text that is shown. What it could not compute stays as it was: the form goes on. */
function use(found) {
  const stages = found.stages.length || found.tree === null ? found.stages : state.check.stages;
  state.check = { ...found, stages: stages.length ? stages : state.check.stages };
  if (found.tree) {
    state.tree = found.tree;
    state.lines = new Map(found.lines.map(([path, line]) => [JSON.stringify(path), line]));
  }
  if (state.scope !== null && !at(state.tree, [state.variants, state.scope])) state.scope = null;
  draw();
}

// ---------------------------------------------------------------- drawing

function draw() {
  drawHead();
  drawSections();
  drawForm();
  drawSide();
  document.body.dataset.ready = String(Number(document.body.dataset.ready ?? 0) + 1);
  document.body.dataset.problems = state.check.problems.length;
}

function drawHead() {
  const changed = editor.value !== state.saved || !state.opened.digest;
  find("file").textContent = visible(state.opened.path);
  find("state").textContent = changed ? "not saved" : "saved";
  find("state").classList.toggle("unsaved", changed);
  find("undo").disabled = !state.undone.length;
  const running = state.job !== null && state.job.exit_code === null;
  for (const one of find("commands").children) one.disabled = running;
  find("stop").hidden = !running;
  document.title = `${changed ? "• " : ""}${visible(state.opened.path)} · whet studio`;
}

function drawSections() {
  const stages = at(state.tree, [state.variants]) ?? [];
  const scoped = state.scope === null ? state.tree : stages[state.scope] ?? {};
  const prefix = state.scope === null ? [] : [state.variants, state.scope];
  const entry = sectionOf(entriesOf(state.schema.properties[state.variants]).node).properties;
  const known = Object.entries(state.schema.properties).filter(([name]) => state.scope === null || entry[name]?.["x-section"]);
  const single = known.filter(([, node]) => isSingle(node)).map(([name]) => name);
  const line = (section, title, names) => {
    const wrong = state.check.problems.filter((one) => one.path && same(one.path.slice(0, prefix.length), prefix) && names.includes(one.path[prefix.length])).length;
    const given = names.reduce((sum, name) => sum + count(scoped[name]), 0);
    return h("button", { type: "button", "aria-current": state.section === section && !state.query ? "true" : null, data: { section: section ?? "*" },
      on: { click: () => show({ section, query: "" }) } }, h("span", {}, title), h("span", { class: "space" }),
    wrong ? h("span", { class: "wrong", title: "problems" }, wrong) : null, given ? h("span", { class: "count", title: "keys given" }, given) : null);
  };
  put(find("sections"), Array.isArray(stages) && stages.length ? select("keys of", [["", "all stages"], ...stages.map((stage, n) => [String(n), String(stage?.name ?? n + 1)])],
    state.scope === null ? "" : String(state.scope), (value) => show({ scope: value === "" ? null : Number(value), section: null })) : null,
  line(null, "Everything", known.map(([name]) => name)), single.length ? line("", "General", single) : null,
  known.filter(([, node]) => !isSingle(node)).map(([name, node]) => line(name, node.title, [name])));
}

function drawForm() {
  const box = find("form");
  const active = document.activeElement;
  const held = box.contains(active) && active.dataset.path ? { path: active.dataset.path, value: active.value, kind: active.dataset.kind,
    fresh: active.value !== active.dataset.shown, start: active.selectionStart, end: active.selectionEnd } : null;
  const top = box.parentElement.scrollTop;
  put(box, form({ ...state, act: { edit, goLine, explain, scope: (scope) => show({ scope, section: null }) } }));
  box.parentElement.scrollTop = top;
  if (!held) return;
  const element = [...box.querySelectorAll("[data-path]")].find((one) => one.dataset.path === held.path);
  if (!element) return;
  if (held.fresh && held.kind !== "choice" && element.value !== held.value) {
    element.value = held.value;
    element.dispatchEvent(new Event("input"));
  }
  element.focus({ preventScroll: true });
  if (held.start !== null && element.setSelectionRange) element.setSelectionRange(held.start, held.end);
}

function drawSide() {
  const { problems, foreign } = state.check;
  const panes = ["YAML", "Plan", ...(state.report ? ["Report"] : []), ...(state.job ? ["Log"] : [])];
  put(find("tabs"), panes.map((name) => h("button", { type: "button", role: "tab", "aria-selected": String(name === state.pane), data: { pane: name },
    on: { click: () => show({ pane: name }) } }, name)));
  put(find("problems"), foreign && h("button", { type: "button", data: { foreign }, on: { click: importText } },
    `This text is written for ${foreign}. Click to translate it into a native config.`),
  problems.map((one) => h("button", { type: "button", data: { told: one.path ? dotted(one.path) : "" }, on: { click: () => goProblem(one) } },
    one.line ? `line ${one.line}: ` : "", visible(one.text))));
  const bad = new Set(problems.map((one) => one.line));
  put(gutter, editor.value.split("\n").map((_, n) => h("span", { class: bad.has(n + 1) ? "bad" : null }, `${n + 1}\n`)));
  const content = { YAML: () => editorPane, Plan: () => planPane(state.check), Report: () => reportPane(state.report, goKey), Log: () => log.element }[state.pane]();
  if (find("pane").firstChild !== content) {
    const [start, top] = [editor.selectionStart, editor.scrollTop];
    put(find("pane"), content);
    if (content === editorPane) [editor.scrollTop] = [top, editor.setSelectionRange(start, start)];
  }
  gutter.scrollTop = editor.scrollTop;
}

function show(change) {
  Object.assign(state, change);
  drawFilters();
  draw();
  if ("section" in change || "scope" in change) find("form").parentElement.scrollTop = 0;
}

let filters = null;

function drawFilters() {
  if (!filters) {
    const search = h("input", { type: "search", id: "search", placeholder: "Search keys and help", "aria-label": "search keys and help",
      on: { input: (event) => show({ query: event.target.value.trim() }) } });
    filters = { search, box: h("span", { class: "bar slim" }) };
    put(find("filters"), search, filters.box);
  }
  if (filters.search.value.trim() !== state.query) filters.search.value = state.query;
  put(filters.box, choice("level", [["beginner", "Basic"], ["expert", "Advanced"]], state.level, (level) => show({ level })),
    tick("only given keys", state.onlySet, (onlySet) => show({ onlySet })));
}

// ---------------------------------------------------------------- going places

function goLine(number) {
  show({ pane: "YAML" });
  const before = editor.value.split("\n").slice(0, number - 1).join("\n").length + (number > 1 ? 1 : 0);
  const end = editor.value.indexOf("\n", before);
  editor.focus();
  editor.setSelectionRange(before, end < 0 ? editor.value.length : end);
  editor.scrollTop = Math.max(0, (number - 6) * (editor.scrollHeight / Math.max(editor.value.split("\n").length, 1)));
}

function goProblem(problem) {
  if (problem.path) goPath(problem.path);
  if (problem.line) goLine(problem.line);
}

function goKey(key) {
  goPath(key.split(/[.[\]]+/).filter(Boolean).map((part) => (/^\d+$/.test(part) ? Number(part) : part)));
}

function goPath(path) {
  const inStage = path[0] === state.variants && path.length > 3;
  const inner = inStage ? path.slice(2) : path;
  const node = state.schema.properties[inner[0]];
  if (!node) return;
  show({ scope: inStage ? path[1] : null, section: isSingle(node) ? "" : inner[0], query: "", onlySet: false, level: "expert" });
  const controls = [...find("form").querySelectorAll("[data-path]")];
  const target = controls.find((one) => one.dataset.path === JSON.stringify(path));
  target?.scrollIntoView({ block: "center" });
  target?.focus({ preventScroll: true });
}

async function explain(key) {
  try {
    const told = await ask("explain", { key: key.map((part) => String(part)).join(".") });
    put(find("explaining"), explanation(told), closing());
    find("explaining").showModal();
  } catch (error) {
    say(error.message, true);
  }
}

function closing(text = "Close") {
  return h("form", { method: "dialog" }, h("button", {}, text));
}

let unsay = 0;

function say(text, wrong = false) {
  const element = find("state");
  clearTimeout(unsay);
  element.textContent = visible(text);
  element.classList.toggle("unsaved", wrong);
  element.dataset.said = visible(text);
  unsay = setTimeout(drawHead, 8000);
}

/** Whether the user says yes, in a dialog of the page. */
function agreed(text, yes) {
  return new Promise((resolve) => {
    const dialog = find("asking");
    const answer = (value) => { dialog.close(); resolve(value); };
    dialog.oncancel = () => resolve(false);
    put(dialog, h("p", {}, visible(text)), h("div", { class: "bar" }, h("button", { type: "button", data: { agree: "yes" }, on: { click: () => answer(true) } }, yes),
      h("button", { type: "button", data: { agree: "no" }, on: { click: () => answer(false) } }, "Cancel")));
    dialog.showModal();
  });
}

// ---------------------------------------------------------------- files

function openDialog() {
  const dialog = find("opening");
  const wrong = h("div", {});
  const path = h("input", { type: "text", id: "open-path", "aria-label": "path", placeholder: state.opened.path, value: "" });
  const upload = h("input", { type: "file", id: "upload", accept: state.endings.join(","), "aria-label": "upload" });
  const dialect = h("input", { type: "text", "aria-label": "system", placeholder: "detected from its keys; or verl@0.9" });
  const here = h("input", { type: "checkbox", checked: true });
  const go = async (make) => {
    try {
      await load(await make({ dialect: dialect.value.trim(), here: here.checked }));
      dialog.close();
    } catch (error) {
      put(wrong, error.message.split("\n").map((line) => h("p", { class: "error", role: "alert" }, visible(line))));
    }
  };
  upload.addEventListener("change", () => upload.files.length && go(async (more) => tell("import", { name: upload.files[0].name, text: await upload.files[0].text(), ...more })));
  const open = () => go((more) => tell("open", { path: path.value.trim(), ...more }));
  path.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
  put(dialog, h("h2", {}, "Open or import"), h("p", { class: "dim" }, "A config of whet, verl, SkyRL, Cosmos-RL or Trinity-RFT. A file of another system is translated, with a report of every key."),
    h("label", { class: "field" }, h("span", {}, `path in ${visible(state.root)}`), path, h("button", { type: "button", id: "open-it", on: { click: open } }, "Open")),
    h("label", { class: "field" }, h("span", {}, "or upload"), upload), h("label", { class: "field" }, h("span", {}, "system of the file"), dialect),
    h("label", { class: "tick" }, here, "fit devices of another system's file to this machine"), wrong, closing("Cancel"));
  dialog.showModal();
}

/** Show what was opened; what is not saved is asked for first. */
async function load(opened) {
  const changed = editor.value !== state.saved && editor.value !== "";
  if (changed && state.opened && !(await agreed("The text on the page is not saved. Discard it?", "Discard it"))) return;
  const before = editor.value;
  setText(opened.text, before || undefined);
  Object.assign(state, { opened, saved: opened.digest ? editor.value : "", begun: editor.value, report: opened.report,
    scope: null, section: null, query: "", pane: opened.report ? "Report" : "YAML" });
  drawFilters();
  await check();
}

async function importText() {
  try {
    await load(await tell("import", { name: state.opened.path, text: editor.value }));
  } catch (error) {
    say(error.message, true);
  }
}

/** Save the text under its name; a file that is another one is overwritten only after a question. */
async function save() {
  const text = editor.value;
  const send = (path, known) => tell("save", { path, text, known });
  let path = state.opened.path;
  if (!state.opened.digest) path = prompt("Save as", path)?.trim();
  if (!path) return false;
  try {
    let told;
    try {
      told = await send(path, path === state.opened.path ? state.opened.digest : "");
    } catch (error) {
      if (error.status !== 409) throw error;
      if (!(await agreed(`${path} already exists, and is not the file that was opened here. Overwrite it?`, "Overwrite"))) return false;
      told = await send(path, error.told.digest);
    }
    Object.assign(state, { opened: { ...told, report: null }, saved: text, begun: text });
    drawHead();
    return true;
  } catch (error) {
    say(error.message, true);
    return false;
  }
}

// ---------------------------------------------------------------- runs

async function run(command) {
  await queue;
  if ((editor.value !== state.saved || !state.opened.digest) && !(await save())) return;
  try {
    state.job = await tell("run", { command, path: state.opened.path, known: state.opened.digest });
    log.clear();
    log.add(state.job);
    show({ pane: "Log" });
    follow(state.job.next, state.job.job);
  } catch (error) {
    say(error.message, true);
    await showRun();
  }
}

/** Show the run that the server has, if it is not on the page: one that goes on since an earlier studio. */
async function showRun() {
  const job = await ask("job", { from: 0 });
  if (!job || job.job === state.job?.job) return;
  state.job = job;
  log.clear();
  log.add(job);
  draw();
  follow(job.next, job.job);
}

/** Ask for the log until the run has ended. */
async function follow(from, number) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    let job;
    try {
      job = await ask("job", { from });
    } catch (error) {
      say(error.message, true);
      continue;
    }
    if (!job || job.job !== number || state.job?.job !== number) return;
    state.job = job;
    log.add(job);
    from = job.next;
    if (job.exit_code !== null && !job.more) break;
  }
  drawHead();
}

async function openViewer() {
  try {
    const { url } = await tell("view");
    const link = h("a", { href: url, target: "_blank", rel: "noopener", data: { viewer: "" } }, "whet view of the run");
    put(find("asking"), h("p", {}, link), closing());
    find("asking").showModal();
  } catch (error) {
    say(error.message, true);
  }
}

// ---------------------------------------------------------------- start

async function start() {
  const [told, schema] = await Promise.all([ask("start"), ask("schema")]);
  useToken(told.page_token);
  history.replaceState(null, "", "/");
  const variants = Object.entries(schema.properties).find(([, node]) => Object.values(sectionOf(entriesOf(node)?.node ?? {})?.properties ?? {}).some((one) => one["x-section"]));
  Object.assign(state, { schema, variants: variants[0], root: told.root, endings: told.endings });
  put(find("commands"), told.commands.map((name) => h("button", { type: "button", data: { command: name }, on: { click: () => run(name) } }, name[0].toUpperCase() + name.slice(1))));
  let waiting = 0;
  editor.addEventListener("input", () => {
    drawHead();
    clearTimeout(waiting);
    waiting = setTimeout(check, CHECK_MS);
  });
  editor.addEventListener("scroll", () => { gutter.scrollTop = editor.scrollTop; });
  find("open").addEventListener("click", openDialog);
  find("save").addEventListener("click", () => later(save));
  find("undo").addEventListener("click", () => { setText(state.undone.pop()); check(); });
  find("stop").addEventListener("click", () => tell("stop").catch((error) => say(error.message, true)));
  addEventListener("beforeunload", (event) => { if (editor.value !== state.begun) event.preventDefault(); });
  addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "s") { event.preventDefault(); later(save); }
    if (event.key === "/" && !event.target.closest?.("input, select, textarea")) { event.preventDefault(); find("search").focus(); }
  });
  await load(told.opened);
  await showRun();
}

start().catch((error) => put(document.querySelector("main"), h("p", { class: "error", role: "alert" }, visible(error.message))));
