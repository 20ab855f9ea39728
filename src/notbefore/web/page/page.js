// Updates the countdowns, and refreshes the page: it replaces only the parts that differ from the page that the agent
// renders now. Other parts are not touched, so that focus, selection, scrolling and unfolded parts stay as they are.
"use strict";

const EVERY = 500; // ms: with a poll a second a change is seen well within two
const TIMEOUT = 5000; // ms for an answer

let ahead = 0; // ms that the agent's clock is ahead of the browser's
let fetched = Date.now(); // when the agent last answered
let paused = false;
let refreshing = false;

function timer(seconds) { // as timer in render.py
  const whole = Math.trunc(Math.abs(seconds)); // the text beside it says that the time has passed
  const two = (number) => String(number).padStart(2, "0");
  const days = Math.floor(whole / 86400), hours = Math.floor(whole / 3600) % 24;
  const rest = two(Math.floor(whole / 60) % 60) + ":" + two(whole % 60);
  if (days) return days + "d " + two(hours) + ":" + rest;
  return hours ? hours + ":" + rest : rest.replace(/^0/, "");
}

function count() {
  if (paused) return;
  const now = (Date.now() + ahead) / 1000;
  for (const one of document.querySelectorAll("[data-until], [data-since]")) {
    const { until, since } = one.dataset;
    const left = until !== undefined ? until - now : now - since;
    if (left < 0 && until !== undefined) one.nextElementSibling.textContent = "past its NotBefore"; // as in pending.html
    const text = timer(left);
    if (one.textContent !== text) one.textContent = text;
  }
}

function synchronize() {
  ahead = document.body.dataset.now * 1000 - Date.now();
  fetched = Date.now();
}

function update(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if ("keep" in old.dataset) return;
  for (const { name } of [...old.attributes]) {
    // the title shows the local time to a reader who points at it
    if (!fresh.hasAttribute(name) && name !== "title") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (!("until" in old.dataset || "since" in old.dataset)) updateChildren(old, fresh);
}

function updateChildren(old, fresh) {
  const key = (node) => node.dataset?.key;
  const keys = new Set([...fresh.childNodes].map(key));
  for (const gone of [...old.childNodes].filter((node) => key(node) && !keys.has(key(node)))) gone.remove();
  const keyed = new Map([...old.childNodes].filter(key).map((node) => [key(node), node]));
  let at = old.firstChild;
  for (const next of fresh.childNodes) {
    let match = key(next) ? keyed.get(key(next)) : at;
    if (match && (match.nodeName !== next.nodeName || key(match) !== key(next))) match = null;
    if (key(next)) keyed.delete(key(next));
    if (!match) {
      old.insertBefore(document.importNode(next, true), at);
      continue;
    }
    // remove nodes without a key that are in the way: a row that is moved loses the reader's focus and selection
    while (match !== at && at && !key(at)) at = removed(at);
    if (match === at) at = at.nextSibling;
    else old.insertBefore(match, at);
    update(match, next);
  }
  while (at) at = removed(at);
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function showSilence(silent) {
  const alert = document.getElementById("silence");
  const text = silent ? "The " + document.body.dataset.who + " does not answer. This is its state at " + timeOfDay(fetched) + " UTC." : "";
  if (alert.textContent !== text) alert.textContent = text;
  alert.hidden = !silent;
}

function timeOfDay(time) {
  return new Date(time + ahead).toISOString().slice(11, 19);
}

async function refresh() {
  if (paused || refreshing || document.hidden) return;
  refreshing = true;
  try {
    const answer = await fetch(location.pathname + location.search, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (paused) return;
    update(document.body, fresh.body);
    document.title = fresh.title;
    synchronize();
    showSilence(false);
  } catch {
    showSilence(true);
  } finally {
    refreshing = false;
    count();
  }
}

function showLocalTime(event) {
  const time = event.target.closest?.("time");
  if (time) time.title = new Date(time.dateTime).toLocaleString([], { dateStyle: "medium", timeStyle: "long" });
}

function setUp() {
  document.addEventListener("mouseover", showLocalTime);
  synchronize();
  const button = document.getElementById("pause");
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Paused at " + timeOfDay(Date.now()) + ": resume" : "Pause";
    refresh();
  });
  document.addEventListener("visibilitychange", refresh);
  setInterval(count, 200);
  setInterval(refresh, EVERY);
}

setUp();
