/* Answers of the server, or those that an exported page brings along. */

import { h, visible } from "./dom.js";

let inlined = null;
const seen = new Map();
const MOST_SEEN = 64;

/** Unpack the answers of an exported page. */
export async function openAnswers() {
  const holder = document.getElementById("answers");
  if (!holder) return;
  const packed = Uint8Array.from(atob(holder.textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  inlined = await new Response(stream).json();
  holder.textContent = "";
}

/** Whether this page is a file that brings its answers. */
export function isExported() {
  return inlined !== null;
}

/** Whether an exported page brings this answer; a live one can always ask. */
export function isThere(url) {
  return inlined === null || Object.hasOwn(inlined, url);
}

/** "api/runs/0/rollouts" and {stage: "rl", step: 3} as one URL; parameters without a value are left out. */
export function address(path, query = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = pairs.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  return text ? `${path}?${text}` : path;
}

/** The path of a run's answers; each part is encoded. */
export function ofRun(run, ...parts) {
  return ["api/runs", run, ...parts].map((part) => (part === "api/runs" ? part : encodeURIComponent(part))).join("/");
}

/** An answer. The same object comes again while the server says that nothing changed. Error: what the server said. */
export async function get(url) {
  if (inlined) {
    if (Object.hasOwn(inlined, url)) return inlined[url];
    throw new Error("This page was exported without it. `whet view RUN` shows everything.");
  }
  let response;
  try {
    response = await fetch(url, { cache: "no-cache", headers: { Accept: "application/json" } });
  } catch {
    throw new Error("The server does not answer. Is `whet view` still running?");
  }
  const tag = response.headers.get("ETag");
  const known = seen.get(url);
  if (response.ok && tag && known?.tag === tag) return known.value;
  let value;
  try {
    value = await response.json();
  } catch {
    throw new Error(`The server answered ${response.status} with something other than JSON.`);
  }
  if (!response.ok) throw new Error(value?.error ?? `The server answered ${response.status}.`);
  if (tag) {
    seen.delete(url);
    seen.set(url, { tag, value });
    if (seen.size > MOST_SEEN) seen.delete(seen.keys().next().value);
  }
  return value;
}

/** Columns of metrics. An exported page brings all of them in one answer. */
export async function getMetrics(run, names) {
  if (inlined) return (await get(ofRun(run, "metrics"))).rows;
  if (!names.length) return { stage: [], step: [] };
  const list = names.map(encodeURIComponent).join(",");
  return (await get(`${ofRun(run, "metrics")}?names=${list}`)).rows;
}

/** A column of summaries as a plain list: it may come as values and the codes of each row. */
export function column(packed, length) {
  if (packed === null || packed === undefined) return new Array(length).fill(null);
  if (Array.isArray(packed)) return packed;
  return packed.codes.map((code) => (code < 0 ? null : packed.values[code]));
}

/** What went wrong, where the answer would be. */
export function failure(error) {
  return h("p", { class: "error", role: "alert", data: { error: "" } }, visible(error?.message ?? error));
}

/** The content that `make` gives, or what went wrong, in its place. */
export async function shown(make) {
  try {
    return await make();
  } catch (error) {
    return failure(error);
  }
}
