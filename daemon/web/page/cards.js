// The cards: bars of slices, leases in rows, a filter over both, and the keys that lead through a bar.

import { askToClearFences, askToDrain, askToEndDrain, askToRevoke } from "./actions.js";
import { paint } from "./colours.js";
import { arrange, by, copyOf, dress, label, say } from "./elements.js";
import { drawPlots } from "./plots.js";
import { count, ID_CHARS, rate, size, span, stateOf } from "./format.js";

const DENSE = 60; // A bar with so many slices has no room between them.
const SOON = 0.1; // The daemon warns in the last tenth of a lease's time, at most 30 s before its end.
const SOON_S = 30;
const RATES = 60; // The launch rates that the daemon keeps.

const cards = new Map(); // by uuid: the card, its element, and its slices and rows by key

export function drawCards(list, isWanted) {
  const known = new Map([...cards].map(([uuid, { element }]) => [uuid, element]));
  arrange(by("cards"), known, list, (card) => card.uuid, (card) => {
    const element = copyOf("card-template");
    cards.set(card.uuid, { element, slices: new Map(), rows: new Map() });
    return element;
  });
  for (const uuid of cards.keys()) if (!known.has(uuid)) cards.delete(uuid);
  for (const card of list) drawCard(card, cards.get(card.uuid), isWanted);
}

export function drawHistory() {
  for (const { element, card } of cards.values()) drawPlots(element.querySelector(".plots"), card);
}

export const usedOf = (card) => card.slices.reduce((sum, slice) => sum + (slice.allocated_bytes ?? 0), 0);

/** Whether a lease's bytes are in the host's memory, and its card's bytes are others'. */
const isParked = (slice) => slice.parked_for_s != null && slice.park === "parked";

export const leasedOf = (card) => card.slices.reduce((sum, slice) => sum + slice.size_bytes, 0);

function drawCard(card, own, isWanted) {
  const { element, slices, rows } = own;
  own.card = card;
  // A tenant's slices lie together, in the order of their grants.
  card.slices.sort((one, other) => (one.tenant < other.tenant ? -1 : one.tenant > other.tenant ? 1 : 0));
  const at = (selector) => element.querySelector(selector);
  const [name, leased, used] = [`GPU ${card.index}`, leasedOf(card), usedOf(card)];
  say(at("h2 .number"), name);
  say(at("h2 .name"), card.name);
  say(at(".uuid code"), card.uuid);
  copies(at(".uuid .copy"), card.uuid, `the UUID of ${name}`);
  at(".alone").hidden = !card.exclusive;
  say(at(".sum .leased"), size(leased));
  const parked = card.parked_bytes ? `, ${size(card.parked_bytes)} of it parked` : "";
  const paced = card.tenant_park_wait_ms ? `, next park in ${span(card.tenant_park_wait_ms / 1000)}` : "";
  say(at(".sum .of"), `leased of ${size(card.capacity_bytes)}${parked}${paced}`);
  say(at(".sum .used"), `${size(used)} used`);
  say(at(".half"), size(card.capacity_bytes / 2));
  say(at(".full"), size(card.capacity_bytes));
  const free = `${size(card.available_bytes)} can be granted`;
  label(at(".bar"), `${name}: ${count(card.slices.length, "lease")}, ${size(leased)}, ${size(used)} used; ${free}`);
  const pieces = piecesOf(card, leased);
  arrange(at(".bar"), slices, pieces, (piece) => piece.key, makePiece);
  for (const piece of pieces) drawPiece(slices.get(piece.key), piece, isWanted);
  at(".bar").classList.toggle("dense", card.slices.length >= DENSE);
  keepOneStop(at(".bar"));
  at(".fence").hidden = card.fenced_bytes === 0;
  say(at(".fence span"), `${size(card.fenced_bytes)} fenced: not proved free, so it is not granted.`);
  const isDrained = card.drain_left_s != null;
  at(".drain").hidden = !isDrained;
  at(".begin").hidden = isDrained;
  const ends = card.drain_left_s ? `the remaining leases end in ${span(Math.ceil(card.drain_left_s))}` : "all of its leases have been ended";
  say(at(".drain span"), isDrained ? `This card is being drained: it grants no leases, and ${ends}.` : "");
  const inRows = card.slices.flatMap((slice) => [slice, ...slice.regions]);
  arrange(at("tbody"), rows, inRows, (slice) => slice.key, () => copyOf("row-template"));
  for (const slice of inRows) drawRow(rows.get(slice.key), slice, isWanted);
  const shown = inRows.filter(isWanted).length;
  label(at(".scroller"), `Leases of ${name}`);
  at(".scroller").hidden = shown === 0;
  at(".none").hidden = shown > 0;
  say(at(".none"), card.slices.length ? "No lease here matches." : "No leases.");
  tellOfMore(element);
  drawRate(at(".rate"), card.launches_per_s);
  drawPlots(at(".plots"), card);
}

/** Returns all of a card's bytes, left to right: leases, their contexts, fenced, warm and free memory. */
function piecesOf(card, leased) {
  const live = card.slices.filter((slice) => slice.state !== "fenced" && !isParked(slice));
  const fenced = card.slices.filter((slice) => slice.state === "fenced");
  const piece = (slice) => ({ key: slice.key, bytes: slice.size_bytes, slice, looks: looksOf(slice) });
  const rest = (key, bytes, text) => ({ key, bytes: Math.max(0, bytes), text, looks: [key] });
  const overhead = card.held_bytes - leased + card.parked_bytes;
  const each = card.slices.length ? overhead / card.slices.length : 0;
  const stuck = card.fenced_bytes - fenced.reduce((sum, slice) => sum + slice.size_bytes + each, 0);
  const free = card.capacity_bytes - card.held_bytes - Math.max(0, stuck) - card.warm_bytes;
  return [
    ...live.map(piece),
    rest("overhead", overhead, "memory of contexts"),
    ...fenced.map(piece),
    rest("fenced", stuck, "fenced"),
    rest("warm", card.warm_bytes, `${card.warm_contexts} pre-created`),
    rest("free", free, "free"),
  ].filter((one) => one.bytes > 0);
}

function looksOf(slice) {
  if (slice.state === "fenced") return ["fenced"];
  const how = { pending: "starting", draining: "ending" }[slice.state];
  return ["owned", ...(how ? [how] : [])];
}

function makePiece(piece) {
  const element = document.createElement(piece.slice ? "button" : "span");
  if (piece.slice) {
    element.type = "button";
    element.tabIndex = -1;
    element.dataset.key = piece.slice.key;
  }
  for (const name of ["fill", "label", "label", "regions"]) {
    const part = document.createElement("span");
    part.className = name;
    element.append(part);
  }
  return element;
}

function drawPiece(element, { slice, bytes, text, looks }, isWanted) {
  const kept = ["marked"].filter((name) => element.classList.contains(name));
  if (slice && !isWanted(slice)) kept.push("out");
  dress(element, "slice", ...looks, ...kept);
  if (element.style.flexGrow !== String(bytes)) element.style.flexGrow = bytes;
  const [fill, first, second, regions] = element.children;
  const used = slice?.allocated_bytes ?? null;
  if (slice) paint(element, slice.tenant);
  fill.style.transform = `scaleX(${used === null ? 0 : (used / bytes).toFixed(4)})`;
  const title = slice ? slice.tenant : text;
  say(first, title);
  say(second, size(bytes));
  drawRegions(regions, slice?.regions ?? [], bytes);
  const about = [title, size(bytes), ...(used === null ? [] : [`${size(used)} used`]), ...(slice ? [stateOf(slice)] : [])];
  for (const region of slice?.regions ?? []) about.push(`region of ${size(region.size_bytes)}`);
  if (element.title !== about.join(", ")) element.title = about.join(", ");
  label(element, about.join(", "));
}

/** Draws a lease's regions as a strip in its slice: each in its share of the bytes, the rest empty. */
function drawRegions(strip, regions, bytes) {
  strip.hidden = regions.length === 0;
  while (strip.children.length > regions.length + 1) strip.lastElementChild.remove();
  while (strip.children.length < regions.length + 1) strip.append(document.createElement("span"));
  const rest = bytes - regions.reduce((sum, region) => sum + region.size_bytes, 0);
  [...strip.children].forEach((part, index) => {
    part.className = index < regions.length ? "region" : "rest";
    part.style.flexGrow = index < regions.length ? regions[index].size_bytes : Math.max(0, rest);
  });
}

function copies(button, text, what) {
  button.hidden = !text;
  button.dataset.copies = text;
  label(button, `Copy ${what}`);
}

function drawRow(row, slice, isWanted) {
  const at = (selector) => row.querySelector(selector);
  const id = slice.lease_id ?? "";
  row.dataset.key = slice.key;
  row.hidden = !isWanted(slice);
  row.classList.toggle("region", slice.is_region === true);
  dress(at(".key"), "key", "slice", ...looksOf(slice));
  paint(at(".key"), slice.tenant);
  say(at(".tenant"), slice.tenant);
  at(".tenant").title = slice.tenant;
  say(at(".id code"), id.slice(0, ID_CHARS));
  at(".id code").title = id;
  copies(at(".copy"), id, `lease id ${id}`);
  say(at(".leased"), size(slice.size_bytes));
  say(at(".used"), slice.allocated_bytes === null ? "–" : size(slice.allocated_bytes));
  say(at(".word"), stateOf(slice));
  dress(at(".word"), "word", `is-${slice.state}`, ...(slice.orphaned_in_s != null ? ["is-orphaned"] : []));
  at(".word").title = slice.reason || (slice.warm_only ? `can only be parked warm: ${slice.warm_only}` : "");
  const launches = slice.state === "fenced" ? null : slice.launches_per_s ?? null;
  say(at(".launches"), launches === null ? "" : rate(launches));
  say(at(".gpu-time"), slice.gpu_s == null ? "" : span(slice.gpu_s));
  at(".revoke").hidden = !id || !["pending", "active"].includes(slice.state);
  label(at(".revoke"), `Revoke ${slice.is_region ? "region" : "lease"} ${id} of ${slice.tenant}`);
  row.slice = slice;
}

function drawRate(figure, rates) {
  const last = rates.at(-1) ?? null;
  const most = Math.max(1, ...rates.map((one) => one ?? 0));
  const [width, height] = [120, 24];
  let [line, isDrawing] = ["", false];
  rates.forEach((one, index) => {
    const x = (width * (index + RATES - rates.length)) / (RATES - 1);
    if (one !== null) line += `${isDrawing ? "L" : "M"}${x.toFixed(1)} ${(height - 2 - ((height - 4) * one) / most).toFixed(1)}`;
    isDrawing = one !== null;
  });
  figure.querySelector(".line").setAttribute("d", line);
  const text = last === null ? "launches/s" : `${rate(last)} launches/s`;
  say(figure.querySelector("figcaption"), text);
  label(figure.querySelector("svg"), `${text}, in the last minute at most ${rate(most)}`);
}

/** Advances the rows' times to `sinceS` seconds after the state. */
export function countDown(sinceS) {
  for (const { rows } of cards.values()) for (const row of rows.values()) countDownRow(row, sinceS);
}

function countDownRow(row, sinceS) {
  const slice = row.slice;
  say(row.querySelector(".age"), span(Math.floor(slice.age_s + sinceS)));
  const isCounted = slice.remaining_s !== null;
  const leftS = isCounted ? Math.max(0, slice.remaining_s - sinceS) : 0;
  const part = isCounted && slice.ttl_s > 0 ? Math.min(1, leftS / slice.ttl_s) : 0;
  row.classList.toggle("uncounted", !isCounted);
  row.querySelector(".left .fill").style.transform = `scaleX(${part.toFixed(4)})`;
  say(row.querySelector(".seconds"), isCounted ? span(leftS) : "–");
  row.classList.toggle("soon", isCounted && leftS <= Math.min(slice.ttl_s * SOON, SOON_S));
}

// --- rows that a card has no room for ---

/** Says how many rows lie below what is shown of a card's list, beside a button that shows all. */
function tellOfMore(card) {
  const [scroller, more] = [card.querySelector(".scroller"), card.querySelector(".more")];
  const end = scroller.getBoundingClientRect().bottom - 1;
  const rows = [...scroller.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
  const below = scroller.hidden ? 0 : rows.filter((row) => row.getBoundingClientRect().bottom > end + 1).length;
  const isWhole = card.classList.contains("whole");
  more.hidden = below === 0 && !isWhole;
  say(more.querySelector("span"), below ? `${count(below, "more row")} below.` : "");
  say(more.querySelector("button"), isWhole ? "Show fewer" : `Show all ${rows.length}`);
}

by("cards").addEventListener("scroll", (event) => tellOfMore(event.target.closest(".card")), true);
addEventListener("resize", () => {
  for (const { element } of cards.values()) tellOfMore(element);
});
by("cards").addEventListener("click", (event) => {
  const card = event.target.closest(".more button")?.closest(".card");
  if (!card) return;
  card.classList.toggle("whole");
  tellOfMore(card);
});

// --- acts ---

by("cards").addEventListener("click", (event) => {
  const slice = event.target.closest(".revoke")?.closest("tr").slice;
  if (slice?.lease_id) askToRevoke(slice);
  for (const [button, askTo] of [[".clear", askToClearFences], [".drain .end", askToEndDrain], [".begin", askToDrain]]) {
    const article = event.target.closest(button)?.closest(".card");
    const own = article && [...cards.values()].find(({ element }) => element === article);
    if (own) askTo(own.card);
  }
});

// --- a card's bar: Tab stops once, arrow keys move within, Enter goes to the lease's row ---

function keepOneStop(bar) {
  const slices = [...bar.querySelectorAll("button")];
  if (slices.length && !slices.some((slice) => slice.tabIndex === 0)) slices[0].tabIndex = 0;
}

function mark(key, isMarked) {
  for (const { slices, rows } of cards.values()) {
    slices.get(key)?.classList.toggle("marked", isMarked);
    rows.get(key)?.classList.toggle("marked", isMarked);
  }
}

by("cards").addEventListener("keydown", (event) => {
  const slice = event.target.closest(".bar > button");
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!slice || step === undefined) return;
  const slices = [...slice.parentElement.querySelectorAll("button")];
  const index = Math.max(0, Math.min(slices.length - 1, slices.indexOf(slice) + step));
  slice.tabIndex = -1;
  slices[index].tabIndex = 0;
  slices[index].focus();
  event.preventDefault();
});

by("cards").addEventListener("click", (event) => {
  const slice = event.target.closest(".bar > button");
  if (!slice) return;
  const row = slice.closest(".card").querySelector(`tr[data-key="${CSS.escape(slice.dataset.key)}"]`);
  row?.scrollIntoView({ block: "nearest" });
  row?.focus({ preventScroll: true });
});

for (const [begin, end] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  for (const [name, isMarked] of [[begin, true], [end, false]]) {
    by("cards").addEventListener(name, (event) => {
      const key = event.target.closest(".bar > button, tbody tr")?.dataset.key;
      if (key) mark(key, isMarked);
    });
  }
}
