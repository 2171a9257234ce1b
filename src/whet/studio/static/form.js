/* The form: sections, entries and fields of a scope (the whole config, or one stage), drawn from the schema alone. */

import { h, visible } from "./dom.js";
import { at, below, covers, dotted, entriesOf, functionsOf, isSection, kindOf, long, nullable, same, sectionOf, yaml } from "./tree.js";

/** Help as it is written in the schema, with `names` as code. */
const prose = (text) => String(text ?? "").split("`").map((part, n) => (n % 2 ? h("code", {}, part) : part));

const WAIT_MS = 350;

/**
 * The elements of a form. view: {schema, variants (key of the list of stages), scope (number of a stage or null), section (key of
 * the schema, "" for single values at the top, null for all), level, onlySet, query, tree, check, act: {edit, goLine, explain, scope}}.
 */
export function form(view) {
  const top = Object.entries(view.schema.properties);
  const inScope = view.scope === null ? top : top.filter(([name]) => name in sectionOf(entriesOf(view.schema.properties[view.variants]).node).properties
    && sectionOf(entriesOf(view.schema.properties[view.variants]).node).properties[name]["x-section"]);
  const chosen = inScope.filter(([name, node]) => view.section === null || name === view.section || (view.section === "" && isSingle(node)));
  const prefix = view.scope === null ? [] : [view.variants, view.scope];
  const given = at(view.tree, prefix);
  const parts = chosen.map(([name, node]) => part(view, { node, key: [name], path: [...prefix, name], value: below(given, name), top: true }));
  const shown = arranged(parts);
  return shown.length ? shown : [h("p", { class: "dim" }, view.query ? "No key matches." : "Nothing is shown at this level.")];
}

/** Whether a node at the top is a single value and no section. */
export function isSingle(node) {
  return !sectionOf(node) && !entriesOf(node);
}

/** Given fields first, then the others, then sections. */
function arranged(parts) {
  const rank = (one) => (one.dataset.kind === "field" ? (one.dataset.given === "true" ? 0 : 1) : 2);
  return parts.filter(Boolean).map((one, n) => [one, n]).sort(([a, m], [b, n]) => rank(a) - rank(b) || m - n).map(([one]) => one);
}

function part(view, spot) {
  if (functionsOf(spot.node)) return functionField(view, spot);
  const entries = entriesOf(spot.node);
  if (entries) return entryList(view, spot, entries);
  return sectionOf(spot.node) ? section(view, spot) : field(view, spot);
}

// ---------------------------------------------------------------- sections

function section(view, spot) {
  const { node, path } = spot;
  const inner = sectionOf(node);
  const value = long(spot.value, node);
  const missing = nullable(node) && !isSection(value) && !isSection(effective(view, spot.key));
  const problems = problemsAt(view, path);
  const parts = missing ? [] : arranged(Object.entries(withUnknown(inner.properties, value)).map(([name, child]) =>
    part(view, { node: child, key: [...spot.key, name], path: [...path, name], value: below(value, name), inside: matches(view, spot, node) || spot.inside })));
  const wanted = missing && offered(view, spot);
  if (!parts.length && !wanted && !problems.length) return null;
  const optional = nullable(node);
  const buttons = missing ? button("Add", () => view.act.edit([{ path, value: {} }]), path)
    : optional && isSection(value) ? button("Remove", () => view.act.edit([{ path }]), path) : null;
  return group(view, spot, { buttons, problems, parts });
}

/** The nodes of a section's keys, and of keys that are given and are not among them: they are shown, to be taken out. */
function withUnknown(properties, value, others = {}) {
  const more = Object.keys(isSection(value) ? value : {}).filter((name) => !Object.hasOwn(properties, name));
  return { ...properties, ...Object.fromEntries(more.map((name) => [name, others[name] ?? { title: name, description: "" }])) };
}

function entryList(view, spot, entries) {
  const { path, key } = spot;
  const value = long(spot.value, spot.node);
  const names = entries.list ? (Array.isArray(value) ? value.map((_, n) => n) : []) : isSection(value) ? Object.keys(value) : [];
  const inner = sectionOf(entries.node);
  const parts = names.map((name) => {
    const one = { node: entries.node, key: [...key, "*"], path: [...path, name], value: long(below(value, name), entries.node) };
    const fields = arranged(Object.entries(inner.properties).map(([child, node]) => (node["x-section"]
      ? null : part(view, { node, key: [...one.key, child], path: [...one.path, child], value: below(one.value, child),
        inside: matches(view, spot, spot.node) || spot.inside }))));
    const problems = problemsAt(view, one.path);
    if (!fields.length && !problems.length && (view.query || view.onlySet)) return null;
    const isVariant = key.length === 1 && key[0] === view.variants;
    const title = entries.list ? one.value?.name ?? `${name + 1}` : name;
    const buttons = [isVariant && button("Edit its keys", () => view.act.scope(name), one.path),
      !entries.list && button("Rename", () => rename(view, one.path), one.path), button("Remove", () => view.act.edit([{ path: one.path }]), one.path)];
    return group(view, { ...one, title }, { buttons, problems, parts: fields });
  }).filter(Boolean);
  const problems = problemsAt(view, path);
  if (!parts.length && !problems.length && !offered(view, spot)) return null;
  const add = button("Add", () => addEntry(view, spot, entries, names), path);
  return group(view, spot, { buttons: add, problems, parts });
}

/** A new entry with the keys that it must have, empty. */
function addEntry(view, spot, entries, names) {
  const inner = sectionOf(entries.node);
  const blank = Object.fromEntries((inner.required ?? []).map((name) => [name, ""]));
  let name = names.length;
  if (!entries.list) name = prompt("Name of the new entry")?.trim();
  else if (Object.hasOwn(blank, "name")) blank.name = `${spot.path[spot.path.length - 1]}-${names.length + 1}`;
  if (name === undefined || name === "" || names.includes(name)) return;
  view.act.edit([{ path: [...spot.path, name], value: blank }]);
}

function rename(view, path) {
  const name = prompt("New name", path[path.length - 1])?.trim();
  if (name) view.act.edit([{ path, rename: name }]);
}

function group(view, spot, { buttons, problems, parts }) {
  const given = spot.value !== undefined;
  const why = unread(view, spot.key);
  return h("section", { class: `group${why && !given ? " unread" : ""}${spot.top ? " top-group" : ""}`,
    data: { kind: "section", group: dotted(spot.path) } },
  h("header", {}, h("h3", { title: spot.node.description }, visible(spot.title ?? spot.node.title ?? "")),
    h("code", { class: "dim" }, visible(dotted(spot.path))), h("span", { class: "space" }), buttons),
  spot.node.description && !spot.title && h("p", { class: "help" }, prose(spot.node.description)),
  why && h("p", { class: "why" }, `No effect: ${why}`), problems, parts);
}

function button(text, act, path) {
  return h("button", { type: "button", class: "quiet", data: { act: `${text} ${dotted(path)}` }, on: { click: act } }, text);
}

// ---------------------------------------------------------------- fields

/** A function by name, and the settings of the chosen one. */
function functionField(view, spot) {
  const { node, path, key } = spot;
  const value = long(spot.value, node);
  const inEffect = scopes(view)[0]?.settings?.[key.join(".")];
  const name = value?.name ?? inEffect?.name;
  const own = field(view, { ...spot, value: value === null ? null : value?.name, node: { ...node, anyOf: [{ type: "string" }, { type: "null" }] },
    path: isSection(spot.value) ? [...path, "name"] : path, names: functionsOf(node) });
  const known = functionsOf(node).find((one) => one.name === name)?.settings ?? {};
  const all = Object.assign({}, ...functionsOf(node).map((one) => one.settings));
  const settings = withUnknown(known, Object.fromEntries(Object.entries(isSection(value) ? value : {}).filter(([each]) => each !== "name")), all);
  const parts = arranged(Object.entries(settings).map(([each, child]) => part(view,
    { node: child, key: [...key, each], path: [...path, each], value: below(value, each), effect: inEffect?.[each] })));
  if (!own && !parts.length) return null;
  return h("div", { class: "function", data: { kind: "section" } }, own, parts.length ? h("div", { class: "settings" }, parts) : null);
}

function field(view, spot) {
  const { node, path, key, value } = spot;
  const given = value !== undefined;
  const problems = problemsAt(view, path);
  const why = unread(view, key);
  if (!isShown(view, spot, given, problems.length > 0, why)) return null;
  const control = controlOf(view, spot);
  const name = h("button", { type: "button", class: "name", title: `${dotted(path)}: explain`, on: { click: () => view.act.explain(key) } },
    visible(node.title ?? path[path.length - 1]));
  const reset = given && h("button", { type: "button", class: "quiet", title: "Remove the key from the file", "aria-label": `remove ${dotted(path)}`,
    data: { reset: dotted(path) }, on: { click: () => view.act.edit([{ path }]) } }, "×");
  return h("div", { class: `field-row${given ? " given" : ""}${why ? " unread" : ""}${problems.length ? " wrong" : ""}`,
    data: { kind: "field", field: dotted(path), given: String(given), unread: why ? "true" : null } },
  h("div", { class: "label" }, name, h("code", { class: "dim" }, visible(dotted(view.query || view.section === null ? path : path.slice(-1))))),
  h("div", { class: "control" }, control, node["x-unit"] && h("span", { class: "unit" }, node["x-unit"]), reset),
  h("div", { class: "about" }, problems, why && h("p", { class: "why" }, `No effect: ${why}`),
    h("p", { class: "origin" }, origin(view, spot)), h("p", { class: "help" }, prose(node.description))));
}

function isShown(view, spot, given, wrong, why) {
  if (view.query) return matches(view, spot, spot.node) || spot.inside;
  if (view.onlySet) return given || wrong;
  if (given || wrong) return true;
  return view.level === "expert" || (spot.node["x-level"] === "beginner" && !why);
}

/** Whether a section or a list that is not given is offered. */
function offered(view, spot) {
  if (view.query) return matches(view, spot, spot.node);
  if (view.onlySet) return false;
  return (view.level === "expert" || hasBasic(spot.node)) && !(view.level !== "expert" && unread(view, spot.key));
}

function hasBasic(node) {
  const inner = sectionOf(entriesOf(node)?.node ?? node);
  return Object.values(inner?.properties ?? {}).some((one) => one["x-level"] === "beginner" || (sectionOf(one) && hasBasic(one)));
}

function matches(view, spot, node) {
  if (!view.query) return false;
  const text = `${dotted(spot.path)} ${spot.key.join(".")} ${node.title ?? ""} ${node.description ?? ""}`.toLowerCase();
  return view.query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

let lists = 0;

function controlOf(view, spot) {
  const { node, path, value } = spot;
  const { kind, values } = kindOf(node);
  const data = { path: JSON.stringify(path), kind };
  const label = { "aria-label": dotted(path), "aria-invalid": problemsAt(view, path).length ? "true" : null, data };
  const known = spot.effect ?? effective(view, spot.key);
  const fallback = known ?? node.default;
  if (kind === "choice" && (value === undefined || values.some((one) => same(one, value)))) {
    const chosen = value === undefined ? "" : JSON.stringify(value);
    const element = h("select", { ...label, on: { change: (event) => view.act.edit([event.target.value === "" ? { path }
      : { path, value: JSON.parse(event.target.value) }]) } },
    h("option", { value: "" }, fallback === undefined || fallback === null ? "default" : `default: ${yaml(fallback)}`),
    values.map((one) => h("option", { value: JSON.stringify(one) }, yaml(one))));
    element.value = chosen;
    return element;
  }
  const isText = kind === "text" && (value === undefined || typeof value === "string");
  const shown = value === undefined || (isText && value === null) ? "" : isText ? value : yaml(value);
  const tag = shown.includes("\n") ? "textarea" : "input";
  const names = spot.names ?? node["x-choices"];
  const list = names && tag === "input" ? h("datalist", { id: `names-${++lists}` }, names.map((one) => h("option", { value: one.name }, one.about))) : null;
  const element = h(tag, { ...label, type: tag === "input" ? "text" : null, rows: tag === "textarea" ? 3 : null, spellcheck: "false", autocomplete: "off",
    list: list?.id, value: shown, placeholder: fallback === undefined || fallback === null ? "" : typeof fallback === "string" ? fallback : yaml(fallback) });
  element.dataset.shown = shown;
  const commit = () => {
    clearTimeout(element.waiting);
    if (element.value === element.dataset.shown) return;
    element.dataset.shown = element.value;
    view.act.edit([element.value === "" ? { path } : isText ? { path, value: element.value } : { path, yaml: element.value }]);
  };
  element.addEventListener("input", () => {
    clearTimeout(element.waiting);
    if (element.value.trim() !== "") element.waiting = setTimeout(commit, WAIT_MS);
  });
  element.addEventListener("blur", commit);
  element.addEventListener("keydown", (event) => { if (event.key === "Enter" && tag === "input") commit(); });
  return [element, list];
}

// ---------------------------------------------------------------- what the checker says

/** The stages that a scope is about: one, or all. */
function scopes(view) {
  const stages = view.check.stages;
  return view.scope === null ? stages : stages.slice(view.scope, view.scope + 1);
}

/** The value in effect of a key; undefined where stages differ, or where nothing is known yet. */
function effective(view, key) {
  if (key.includes("*")) return undefined;
  const values = scopes(view).map((stage) => at(stage.resolved, key));
  return values.length && values.every((one) => same(one, values[0])) ? values[0] : undefined;
}

function origin(view, spot) {
  const { path, key, node, value } = spot;
  const line = lineOf(view, path);
  const inEffect = spot.effect ?? effective(view, key);
  const link = (number, text) => h("button", { type: "button", class: "line", on: { click: () => view.act.goLine(number) } }, text);
  if (value !== undefined) {
    const differs = inEffect !== undefined && inEffect !== null && !same(inEffect, value) && !isSection(inEffect) && JSON.stringify(value).includes("${");
    return [differs && `= ${visible(yaml(inEffect))} · `, line && link(line, `line ${line}`)];
  }
  const inherited = view.scope !== null && at(view.check.stages[view.scope]?.given, key);
  const base = lineOf(view, key);
  if (inherited !== undefined && inherited !== false && view.scope !== null && base) return [`${visible(yaml(inherited))} from `, link(base, `line ${base}, for all stages`)];
  const differ = view.scope === null && !key.includes("*") && new Set(scopes(view).map((stage) => JSON.stringify(at(stage.resolved, key)))).size > 1;
  if (differ) return "stages differ";
  if (inEffect === undefined || inEffect === null || isSection(inEffect)) return node.default === undefined ? "" : node.default === null ? "not given" : `default ${yaml(node.default)}`;
  if (view.scope === null && scopes(view).some((stage) => at(stage.given, key) !== undefined)) return `${visible(yaml(inEffect))}, given in stages`;
  return same(inEffect, node.default) ? `default ${visible(yaml(inEffect))}` : `${visible(yaml(inEffect))}, follows from other keys`;
}

function lineOf(view, path) {
  return view.lines.get(JSON.stringify(path));
}

/** Why nothing reads a key: in the stage, or in every stage. */
function unread(view, key) {
  const stages = scopes(view);
  if (!stages.length) return null;
  const whys = stages.map((stage) => stage.unread.find(([pattern]) => covers(pattern, key))?.[1]);
  return whys.every(Boolean) ? whys[0] : null;
}

function problemsAt(view, path) {
  const found = view.check.problems.filter((one) => one.path && same(one.path, path));
  return found.map((one) => h("p", { class: "error", role: "alert", data: { problem: dotted(path) } }, visible(one.text)));
}
