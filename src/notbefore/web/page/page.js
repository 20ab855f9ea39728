// Updates the countdowns, and refreshes the page. It fetches the page as the agent renders it now, and replaces only the
// parts that differ, so that focus, selection and scrolling stay as they are.
"use strict";

const REFRESH_INTERVAL = 500; // ms: with a poll a second, a change is shown within two seconds
const COUNT_INTERVAL = 200; // ms: each second is shown in time
const TIMEOUT = 5000; // ms for an answer

let ahead = 0; // ms by which the agent's clock is ahead of the browser's
let fetched = Date.now(); // when the agent last answered, by the browser's clock
let paused = false;
let refreshing = false;

// The same as timer in render.py. It has no sign: the text next to it says whether the time has passed.
function timer(seconds) {
  const whole = Math.trunc(Math.abs(seconds));
  const days = Math.floor(whole / 86400);
  const hours = Math.floor(whole / 3600) % 24;
  const minutes = Math.floor(whole / 60) % 60;
  const rest = twoDigits(whole % 60);
  if (days) return days + "d " + twoDigits(hours) + ":" + twoDigits(minutes) + ":" + rest;
  if (hours) return hours + ":" + twoDigits(minutes) + ":" + rest;
  return minutes + ":" + rest;
}

function twoDigits(number) {
  return String(number).padStart(2, "0");
}

function updateCounters() {
  if (paused) return;
  const now = (Date.now() + ahead) / 1000;
  for (const counter of document.querySelectorAll("[data-until], [data-since]")) {
    const { until, since } = counter.dataset;
    const isCountdown = until !== undefined;
    const seconds = isCountdown ? until - now : now - since;
    if (isCountdown && seconds < 0) counter.nextElementSibling.textContent = "past its NotBefore"; // as in pending.html
    setText(counter, timer(seconds));
  }
}

// A text that stays the same is not set: that would end a selection.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function readClock() {
  ahead = document.body.dataset.now * 1000 - Date.now();
  fetched = Date.now();
}

// Makes an element or a text of this page equal to one of the fresh page.
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
  const isCounter = "until" in old.dataset || "since" in old.dataset; // updateCounters writes its text
  if (!isCounter) updateChildren(old, fresh);
}

// undefined for a text, and for an element without a key
function keyOf(node) {
  return node.dataset?.key;
}

// Children with a key correspond to those with the same key. The others correspond to those at the same place.
function updateChildren(old, fresh) {
  removeGone(old, fresh);
  const byKey = new Map();
  for (const child of old.childNodes) {
    if (keyOf(child)) byKey.set(keyOf(child), child);
  }

  let place = old.firstChild; // where the next child belongs
  for (const next of fresh.childNodes) {
    const key = keyOf(next);
    const candidate = key ? byKey.get(key) : place;
    byKey.delete(key); // a second child with this key is a new one
    if (!candidate || candidate.nodeName !== next.nodeName || keyOf(candidate) !== key) {
      old.insertBefore(document.importNode(next, true), place);
      continue;
    }
    // do not move the candidate if nodes without a key can be removed instead: a row that is moved loses focus and selection
    while (candidate !== place && place && !keyOf(place)) place = removeAndReturnNext(place);
    if (candidate === place) place = place.nextSibling;
    else old.insertBefore(candidate, place);
    update(candidate, next);
  }
  while (place) place = removeAndReturnNext(place);
}

// Removes the children whose key the fresh page does not have.
function removeGone(old, fresh) {
  const freshKeys = new Set([...fresh.childNodes].map(keyOf));
  for (const child of [...old.childNodes]) {
    if (keyOf(child) && !freshKeys.has(keyOf(child))) child.remove();
  }
}

function removeAndReturnNext(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function showSilence() {
  const alert = document.getElementById("silence");
  const who = document.body.dataset.who;
  setText(alert, "The " + who + " does not answer. This is its state at " + timeOfDay(fetched) + " UTC.");
  alert.hidden = false;
}

function hideSilence() {
  const alert = document.getElementById("silence");
  setText(alert, "");
  alert.hidden = true;
}

// The time of day in UTC, by the agent's clock.
function timeOfDay(time) {
  return new Date(time + ahead).toISOString().slice(11, 19);
}

async function refresh() {
  if (paused || refreshing || document.hidden) return;
  refreshing = true;
  try {
    const options = { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) };
    const answer = await fetch(location.pathname + location.search, options);
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (paused) return; // the reader has paused it in the meantime
    update(document.body, fresh.body);
    document.title = fresh.title;
    readClock();
    hideSilence();
  } catch {
    showSilence();
  } finally {
    refreshing = false;
    updateCounters();
  }
}

function showLocalTime(event) {
  const time = event.target.closest?.("time");
  if (time) time.title = new Date(time.dateTime).toLocaleString([], { dateStyle: "medium", timeStyle: "long" });
}

function setUp() {
  document.addEventListener("mouseover", showLocalTime);
  readClock();
  const button = document.getElementById("pause");
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Paused at " + timeOfDay(Date.now()) + ": resume" : "Pause";
    refresh();
  });
  document.addEventListener("visibilitychange", refresh);
  setInterval(updateCounters, COUNT_INTERVAL);
  setInterval(refresh, REFRESH_INTERVAL);
}

setUp();
