// The tenants: a card and a slice of the bar for each. The server's texts become text nodes, never markup.

import { revoke } from "./stream.js";

const HUE_STEP = 137.5; // The golden angle: neighbours' colours differ, however many there are.
const FIRST_HUE = 250;
const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const by = (id) => document.getElementById(id);

/** Sets an element's text, as a text node, if it differs. */
export const say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

export const number = (value) => integer.format(value);

/** A time with three digits at least. */
export const time = (ms) => `${ms < 100 ? ms.toPrecision(3) : number(ms)} ms`;

const hues = new Map();

/** Gives an element its tenant's colour, by the tenant's place. */
export function paint(element, tenant) {
  if (!hues.has(tenant)) hues.set(tenant, (FIRST_HUE + HUE_STEP * hues.size) % 360);
  element.style.setProperty("--hue", hues.get(tenant));
}

export const copyOf = (id) => by(id).content.firstElementChild.cloneNode(true);

/** Keeps an element for each item in `parent`, in order; `known` has them by key. */
export function arrange(parent, known, items, keyOf, make) {
  const keys = new Set(items.map(keyOf));
  for (const [key, element] of known) {
    if (keys.has(key)) continue;
    element.remove();
    known.delete(key);
  }
  items.forEach((item, place) => {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const element = known.get(key);
    if (parent.children[place] !== element) parent.insertBefore(element, parent.children[place] ?? null);
  });
}

const cards = new Map();
const slices = new Map();
const idOf = (tenant) => tenant.id;

export function drawTenants(tenants, isOperator) {
  arrange(by("tenants"), cards, tenants, idOf, makeCard);
  arrange(by("bar"), slices, tenants, idOf, makeSlice);
  for (const tenant of tenants) {
    drawCard(cards.get(tenant.id), tenant);
    cards.get(tenant.id).querySelector(".revoke").hidden = !isOperator;
    drawSlice(slices.get(tenant.id), tenant);
  }
}

function makeCard(tenant) {
  const card = copyOf("tenant-template");
  paint(card.querySelector(".key"), tenant.id);
  say(card.querySelector(".name"), tenant.id);
  const button = card.querySelector(".revoke");
  button.setAttribute("aria-label", `Revoke the region of ${tenant.id}`);
  button.addEventListener("click", () => askToRevoke(tenant.id));
  return card;
}

// --- the dialog that a region's end is confirmed in ---

let asked = ""; // the tenant that it is about
const live = new Map();

function askToRevoke(tenant) {
  asked = tenant;
  const count = live.get(tenant) ?? 0;
  const work = count === 1 ? "1 sequence" : `${number(count)} sequences`;
  say(by("revoke-title"), `Revoke the region of ${tenant}?`);
  say(
    by("revoke-about"),
    `Its keys and values on the card are lost at once. Work in progress (${work}) is computed again in a new region and continues with the same tokens. Other tenants lose nothing.`,
  );
  say(by("revoke-outcome"), "");
  say(by("revoke-cancel"), "Cancel");
  by("revoke-do").disabled = false;
  by("revoke-dialog").showModal();
  // An operator who presses Enter without looking cancels.
  by("revoke-cancel").focus();
}

by("revoke-cancel").addEventListener("click", () => by("revoke-dialog").close());
by("revoke-do").addEventListener("click", async () => {
  const tenant = asked;
  by("revoke-do").disabled = true;
  const why = await revoke(tenant);
  const outcome = why || `The region of ${tenant} is revoked.`;
  say(by("outcome"), outcome);
  if (asked !== tenant || !by("revoke-dialog").open) return;
  say(by("revoke-outcome"), outcome);
  say(by("revoke-cancel"), "Close");
  by("revoke-cancel").focus();
});

function stateOf(tenant) {
  if (!tenant.blocks) return ["lost", "Its region is gone; another one is being opened."];
  if (tenant.live) return ["", "Generating"];
  return ["idle", tenant.waiting ? "Waiting" : "Idle"];
}

function drawCard(card, tenant) {
  const [kind, words] = stateOf(tenant);
  card.classList.toggle("lost", kind === "lost");
  card.classList.toggle("idle", kind === "idle");
  const show = (name, text) => say(card.querySelector(name), text);
  show(".state", words);
  show(".rate strong", number(tenant.tokens_s));
  live.set(tenant.id, tenant.live);
  show(".live", number(tenant.live));
  show(".waiting", number(tenant.waiting));
  show(".blocks", `${number(tenant.blocks_used)} of ${number(tenant.blocks_at_most)}`);
  show(".tokens", number(tenant.tokens));
  show(".gpu", `${number(tenant.gpu_s)} s`);
  show(".first", times(tenant.first_token_ms));
  show(".gap", times(tenant.gap_ms));
  show(".refused", kinds(tenant.refused) || "0");
  show(".rebinds", number(tenant.rebinds));
  show(".latency", tenant.rebind_ms === null ? "–" : `${number(tenant.rebind_ms)} ms`);
  const text = card.querySelector(".text");
  text.hidden = tenant.text === null;
  say(text, tenant.text ?? "");
}

const times = ([median, high]) => (median === null ? "–" : `${time(median)}; ${time(high)}`);

/** Refusals by their kinds, as a text. */
export const kinds = (counts) => Object.entries(counts).map(([kind, count]) => `${kind} ${number(count)}`).join(", ");

function makeSlice(tenant) {
  const slice = copyOf("slice-template");
  paint(slice, tenant.id);
  return slice;
}

function drawSlice(slice, tenant) {
  slice.style.flexGrow = tenant.blocks_at_most;
  slice.classList.toggle("lost", !tenant.blocks);
  slice.querySelector(".fill").style.transform = `scaleX(${tenant.blocks_used / tenant.blocks_at_most})`;
  say(slice.querySelector(".who"), tenant.id);
  const words = tenant.blocks ? `${tenant.blocks_used} of ${tenant.blocks} blocks` : "no region";
  slice.setAttribute("aria-label", `${tenant.id}: ${words}`);
}
