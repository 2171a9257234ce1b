/* Addresses of the page's own pages. */

import { h } from "./dom.js";

/** "#/run/0/rollouts?stage=rl" of parts and a query; what has no value is left out. */
export function hashOf(parts, query = {}) {
  const path = parts
    .filter((part) => part !== "" && part !== null && part !== undefined)
    .map((part) => encodeURIComponent(part))
    .join("/");
  const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = pairs.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** Names as one value of a query: a comma within a name, a source's label say, is no end of it. */
export function listed(names) {
  return names.map((name) => name.replace(/[%,]/g, encodeURIComponent)).join(",");
}

/** The names of such a value. */
export function named(text) {
  return text.split(",").map((name) => name.replace(/%2C|%25/g, decodeURIComponent));
}

/** A link to one of the page's own pages. */
export function link(parts, query, ...children) {
  return h("a", { href: hashOf(parts, query) }, children);
}

/** A link to one rollout. */
export function rolloutLink(run, stage, step, row, ...children) {
  return link(["run", run, "rollout", stage, step, row], {}, children.length ? children : `${stage} ${step}/${row}`);
}

/** The stage that a page is about: the one of the address, else the last that has steps. */
export function stageOf(run, query) {
  const names = stageNames(run);
  if (query.stage && names.includes(query.stage)) return query.stage;
  const taken = (run.stages ?? []).filter((stage) => stage.steps);
  return (taken[taken.length - 1] ?? { name: names[names.length - 1] }).name ?? null;
}

/** The stages of a run, by name. */
export function stageNames(run) {
  return (run.stages ?? []).map((stage) => stage.name);
}
