/* What is shown where: the part of the address after # names the page and everything worth a link on it. */

import { h, put, visible } from "./dom.js";
import { get, isExported, failure, ofRun, openAnswers } from "./api.js";
import { hashOf } from "./route.js";
import { comparePage, runsPage } from "./runs.js";
import { runPage } from "./run.js";
import { rolloutsPage } from "./rollouts.js";
import { rolloutPage } from "./rollout.js";
import { groupPage } from "./group.js";
import { evaluationsPage, ledgerPage, mismatchPage, rewardsPage, timelinePage } from "./numbers.js";

const POLL_MS = 2000;

/** Paths, where `:name` is any part; the page; its name for styles and tests. */
const ROUTES = [
  ["", runsPage, "runs"],
  ["compare", comparePage, "compare"],
  ["run/:run", runPage, "run"],
  ["run/:run/rollouts", rolloutsPage, "rollouts"],
  ["run/:run/rollout/:stage/:step/:row", rolloutPage, "rollout"],
  ["run/:run/group/:stage/:step/:uid", groupPage, "group"],
  ["run/:run/rewards", rewardsPage, "rewards"],
  ["run/:run/ledger", ledgerPage, "ledger"],
  ["run/:run/timeline", timelinePage, "timeline"],
  ["run/:run/mismatch", mismatchPage, "mismatch"],
  ["run/:run/evals", evaluationsPage, "evals"],
];
const TABS = [
  ["", "Overview"],
  ["rollouts", "Rollouts"],
  ["rewards", "Rewards"],
  ["ledger", "Ledger"],
  ["timeline", "Timeline"],
  ["mismatch", "Mismatch"],
  ["evals", "Evaluations"],
];

let visit = 0;
let pressed = {};

/** The page of a path, with what its `:name` parts stand for. */
function match(path) {
  const parts = path
    .split("/")
    .filter((part) => part !== "")
    .map(decodeURIComponent);
  for (const [pattern, page, name] of ROUTES) {
    const wanted = pattern.split("/").filter((part) => part !== "");
    if (wanted.length !== parts.length || !wanted.every((part, n) => part.startsWith(":") || part === parts[n]))
      continue;
    const params = Object.fromEntries(
      wanted.flatMap((part, n) => (part.startsWith(":") ? [[part.slice(1), parts[n]]] : [])),
    );
    return { page, name, params };
  }
  return null;
}

function runHeader(run, current) {
  return h(
    "div",
    { class: "run-header" },
    h("h1", {}, visible(run.name ?? run.path)),
    stateBadge(run),
    h("span", { class: "dim path" }, visible(run.path)),
    h(
      "nav",
      { class: "tabs", "aria-label": "pages of the run" },
      TABS.map(([path, text]) =>
        h("a", { href: hashOf(["run", run.id, path]), "aria-current": path === current ? "page" : null }, text),
      ),
    ),
  );
}

/** What a run does; one that does nothing and cannot be read whole is damaged, as in the list of runs. */
function stateBadge(run) {
  const state = run.state !== "running" && (run.problems ?? []).length ? "damaged" : run.state;
  return h("span", { class: `badge ${String(state).replaceAll(" ", "-")}`, data: { state } }, state);
}

async function navigate() {
  const mine = ++visit;
  const main = document.querySelector("main");
  const hash = location.hash.replace(/^#\/?/, "");
  const [path, query = ""] = hash.split("?");
  delete document.body.dataset.ready;
  pressed = {};
  let found = null;
  try {
    found = match(path);
  } catch {
    /* a part of the address that cannot be decoded is no page */
  }
  const content = h("div", { class: "page" });
  const header = h("div", {});
  const context = {
    ...found,
    content,
    visit: mine,
    update: null,
    query: Object.fromEntries(new URLSearchParams(query)),
    /** Put the page's state into the address, without loading it again. */
    setQuery(values) {
      context.query = Object.fromEntries(
        Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== ""),
      );
      history.replaceState(null, "", hashOf(path.split("/").map(decodeURIComponent), context.query));
    },
    /** Keys of the page: {key: what it does}. */
    keys(more) {
      Object.assign(pressed, more);
    },
    /** Whether the page is still the one that is shown. */
    isCurrent: () => mine === visit,
  };
  try {
    if (!found) throw new Error(`There is no page ${hash}.`);
    if (found.params.run !== undefined) {
      context.run = await get(ofRun(found.params.run));
      put(
        header,
        runHeader(
          context.run,
          ["rollout", "group"].includes(found.name) ? "rollouts" : found.name === "run" ? "" : found.name,
        ),
      );
      pressed.u = () => {
        location.hash = hashOf(["run", context.run.id]);
      };
    }
    put(content, await found.page(context));
  } catch (error) {
    put(content, failure(error));
  }
  if (!context.isCurrent()) return;
  put(main, header, content);
  const named = context.run && visible(context.run.name ?? context.run.path);
  document.title = [named, found?.name ?? "not found", "whet"].filter(Boolean).join(" · ");
  document.body.dataset.page = found?.name ?? "none";
  document.body.dataset.ready = location.hash || "#/";
  context.shown?.();
  poll(context, header);
}

/** Ask again every two seconds while the page is looked at, also of a run that has ended: it may be resumed. Tell the
 * page when something is new. */
async function poll(context, header) {
  const live = document.getElementById("live");
  const url = context.run ? ofRun(context.run.id) : "api/runs";
  live.textContent = isExported() ? "exported" : "";
  if (isExported()) return;
  let known = context.run ?? (await get(url).catch(() => null));
  const tell = (now) => {
    const goesOn = [now, ...(now?.runs ?? [])].some((one) => one?.state === "running");
    live.classList.toggle("on", goesOn);
    live.textContent = goesOn ? "live" : "";
  };
  tell(known);
  while (context.isCurrent()) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    if (document.hidden || !context.isCurrent()) continue;
    try {
      const next = await get(url);
      if (!context.isCurrent()) continue;
      tell(next);
      if (next === known) continue;
      if (context.run) context.run = next;
      if (context.run) header.querySelector(".badge")?.replaceWith(stateBadge(next));
      await context.update?.(next);
      known = next;
      document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
    } catch (error) {
      if (context.isCurrent()) live.textContent = visible(error.message);
    }
  }
}

function keyPressed(event) {
  const typing = event.target.closest?.("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = pressed[event.key] ?? { "?": () => document.getElementById("keys").showModal() }[event.key];
  if (!act) return;
  if (event.key === "Enter" && event.target.closest?.("a, button")) return;
  event.preventDefault();
  act();
}

async function start() {
  try {
    await openAnswers();
  } catch (error) {
    put(document.querySelector("main"), failure(`The answers in this file cannot be read: ${error.message}`));
    return;
  }
  addEventListener("hashchange", navigate);
  addEventListener("keydown", keyPressed);
  document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
  await navigate();
}

start();
