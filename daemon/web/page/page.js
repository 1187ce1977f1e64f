// The daemon's page: it takes its state from /api/v1/events, draws it, and counts down until the next state.
//
// The daemon's texts become text nodes and numbers, never markup. The browser's monotonic clock counts the time left
// from the moment a state arrived.

import { askForToken, askToDrain, askToEndDrain } from "./actions.js";
import { assignColours } from "./colours.js";
import { countDown, drawCards, drawHistory, leasedOf, usedOf } from "./cards.js";
import { by, say } from "./elements.js";
import { ageEvents, drawEvents } from "./events.js";
import { countDownFleet, drawFleet } from "./fleet.js";
import { keepHistory } from "./plots.js";
import { abortIfSilent, keepConnected, keepToken, stream } from "./stream.js";
import { count, size, span, stateOf } from "./format.js";

const STALE_MS = 4000; // The daemon sends a state every second. After so long without one, the page may be wrong.
const TICK_MS = 500;

let state = null;
let arrivedMs = 0; // the arrival of `state`

function draw() {
  document.body.classList.toggle("named", state.named);
  say(by("names"), state.named ? "Sign out" : "Operator");
  say(by("host"), state.host || "gpuleased");
  document.title = state.host ? `${state.host} – gpuleased` : "gpuleased";
  say(by("version"), state.version.replace("/", " "));
  drawTotals();
  drawFleet(state.fleet);
  const inCards = state.cards.flatMap((card) => card.slices.flatMap((slice) => [slice, ...slice.regions]));
  assignColours([...inCards, ...state.events].map((one) => one.tenant));
  drawCards(state.cards, isWanted);
  drawEvents(state.events, isWanted, new Map(state.cards.map((card) => [card.uuid, `GPU ${card.index}`])));
  tick();
}

function drawTotals() {
  const slices = state.cards.flatMap((card) => card.slices);
  const sum = (of) => state.cards.reduce((whole, card) => whole + of(card), 0);
  const tenants = new Set(slices.map((slice) => slice.tenant)).size;
  say(by("totals"), slices.length ? `${count(slices.length, "lease")} of ${count(tenants, "tenant")}` : "no leases");
  say(by("total-leased"), `${size(sum(leasedOf))} of ${size(sum((card) => card.capacity_bytes))}`);
  say(by("total-used"), size(sum(usedOf)));
  say(by("total-free"), size(sum((card) => card.available_bytes)));
  // The host's memory is the node's, so every card says the same.
  const [held, most] = [state.cards[0]?.park_host_bytes ?? 0, state.cards[0]?.park_host_limit_bytes ?? 0];
  say(by("total-parked"), `${size(held)} of ${size(most)}`);
  by("parked-meter").value = most ? held / most : 0;
  by("total-parked").closest("div").hidden = most === 0;
  const fenced = sum((card) => card.fenced_bytes);
  say(by("total-fenced"), size(fenced));
  by("total-fenced").parentElement.hidden = fenced === 0;
}

// --- the filter ---

function isWanted(one) {
  const wanted = by("filter").value.trim().toLowerCase();
  const texts = [one.tenant, one.lease_id ?? "", "state" in one ? stateOf(one) : one.cause ?? ""];
  return !wanted || texts.some((text) => text.toLowerCase().includes(wanted));
}

by("filter").addEventListener("input", () => state && draw());
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, dialog");
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    by("filter").focus();
    event.preventDefault();
  } else if (event.key === "Escape" && event.target === by("filter")) {
    by("filter").value = "";
    if (state) draw();
  }
});

// --- time ---

function tick() {
  const nowMs = performance.now();
  const sinceS = (nowMs - arrivedMs) / 1000;
  drawStatus(nowMs);
  if (state === null) return;
  countDown(sinceS);
  ageEvents(sinceS);
  countDownFleet(state.fleet, sinceS);
  by("drain").hidden = state.drain_left_s === null;
  by("drain-begin").hidden = !state.named || state.drain_left_s !== null;
  if (state.drain_left_s !== null) {
    const leftS = Math.max(0, state.drain_left_s - sinceS);
    const when = leftS ? `the remaining leases end in ${span(Math.ceil(leftS))}` : "all leases have been ended";
    say(by("drain-text"), `This host is being drained: it grants no leases, and ${when}.`);
  }
}

function drawStatus(nowMs) {
  const isOld = !stream.isFed || nowMs - arrivedMs > STALE_MS;
  const isLost = !stream.isConnected || (isOld && state !== null);
  document.body.classList.toggle("live", stream.isConnected && !isOld);
  document.body.classList.toggle("lost", isLost && (state !== null || stream.why !== ""));
  if (stream.isConnected && !isOld) say(by("status"), "Live");
  else if (stream.isConnected) say(by("status"), nowMs - stream.openedMs < STALE_MS ? "Connecting" : "The daemon does not answer.");
  else if (stream.why || state !== null) say(by("status"), `No connection to the daemon${stream.why ? ` (${stream.why})` : ""}, trying again.`);
  const seconds = Math.floor((nowMs - arrivedMs) / 1000);
  say(by("since"), isLost && state !== null ? `This page is ${span(seconds)} old.` : "");
}

// --- start ---

by("names").addEventListener("click", () => (state?.named ? keepToken("") : askForToken()));
by("drain-begin").addEventListener("click", () => askToDrain(null));
by("drain-end").addEventListener("click", () => askToEndDrain(null));

setInterval(() => {
  tick();
  abortIfSilent();
}, TICK_MS);
const onState = (next) => {
  state = next;
  arrivedMs = performance.now();
  draw();
};
keepConnected(onState, askForToken, tick);
keepHistory(() => state && drawHistory());
