// The daemon's page: takes its state from /api/v1/events, draws it, counts down between two looks.
//
// All that comes from the daemon becomes text nodes and numbers, never markup. Time left is counted by the browser's
// monotonic clock from the moment a state arrived.

const STALE_MS = 4000; // The daemon looks every second: without a state for so long, what is shown may be wrong.
const SILENT_MS = 10000; // A stream says something every three seconds; one that does not is given up.
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5000;
const TICK_MS = 250;
const COLOURS = 8;
const DENSE = 60; // Slices on one card from which on there is no room between them.
const SOON = 0.1; // The last tenth of a lease's time is its warning, 30 s at most: as the daemon has it.
const SOON_S = 30;
const TOKEN = "gpulease-token";
const SENDABLE = /^[!-~]+$/; // With others fetch fails as if there were no daemon: one that was copied from a text, say.

const by = (id) => document.getElementById(id);
const cards = new Map(); // by uuid
const events = new Map(); // by number
const colours = new Map(); // by tenant
let state = null;
let arrivedMs = 0; // when `state` came
let openedMs = 0; // when the stream began
let heardMs = 0; // when the stream last said anything
let isConnected = false;
let isFed = false; // whether this stream has brought a state
let why = "";
let connection = null;

// --- words ---

const integer = new Intl.NumberFormat("en");

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  const digits = count >= 100 || Number.isInteger(count) ? 0 : 1;
  return `${count.toFixed(digits)} ${units[unit]}`;
}

function timeLeft(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

function age(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

const PHASES = { active: "is active", warning: "is warned", grace: "is ending", ended: "has ended" };
const spaced = (word) => String(word).replaceAll("_", " ");

function stateOf(slice) {
  if (slice.state === "fenced") return "fenced";
  if (slice.state === "pending") return "starting";
  if (slice.state === "draining") return slice.cause ? `ending, ${spaced(slice.cause)}` : "ending";
  return slice.phase === "warning" ? "active, warned" : "active";
}

function looksOf(slice) {
  if (slice.state === "fenced") return ["fenced"];
  const how = { pending: "starting", draining: "ending" }[slice.state];
  return [...coloursOf(slice.tenant), ...(how ? [how] : [])];
}

// --- colours: one for each tenant that is there, kept for as long as it is ---

function coloursOf(tenant) {
  const number = colours.get(tenant);
  if (number === undefined) return [];
  return [`c${number % COLOURS}`, ...(number >= COLOURS ? ["dotted"] : [])];
}

function giveColours(tenants) {
  for (const tenant of colours.keys()) if (!tenants.has(tenant)) colours.delete(tenant);
  for (const tenant of tenants) {
    if (colours.has(tenant)) continue;
    const taken = new Set(colours.values());
    let number = 0;
    while (taken.has(number)) number += 1;
    colours.set(tenant, number);
  }
}

// --- drawing: what is there already is changed, not made anew ---

const say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

const dress = (element, ...names) => {
  const wanted = names.join(" ");
  if (element.className !== wanted) element.className = wanted;
};

const copyOf = (id) => by(id).content.firstElementChild.cloneNode(true);

/** Has `parent` hold the elements of `items`, in their order; `known` keeps them by key, `make` makes one. */
function arrange(parent, known, items, keyOf, make) {
  const keys = new Set(items.map(keyOf));
  for (const [key, element] of known) {
    if (keys.has(key)) continue;
    element.remove();
    known.delete(key);
  }
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const element = known.get(key);
    if (element === before) before = before.nextElementSibling;
    else parent.insertBefore(element, before);
  }
}

function drawCard(card) {
  const { element, slices, rows } = cards.get(card.uuid).own;
  // What a tenant has lies together; within that, in the order it was granted.
  card.slices.sort((one, other) => colours.get(one.tenant) - colours.get(other.tenant));
  const at = (selector) => element.querySelector(selector);
  const name = `GPU ${card.index}`;
  say(at("h2 .number"), name);
  say(at("h2 .name"), card.name);
  say(at(".uuid"), card.uuid + (card.exclusive ? ", one lease has it to itself" : ""));
  const leased = card.slices.reduce((sum, slice) => sum + slice.size_bytes, 0);
  say(at(".sum strong"), bytes(leased));
  say(at(".sum span"), `leased of ${bytes(card.capacity_bytes)}`);
  say(at(".half"), bytes(card.capacity_bytes / 2));
  say(at(".full"), bytes(card.capacity_bytes));
  at(".scroller").setAttribute("aria-label", `Leases of ${name}`);
  at(".scroller").hidden = !card.slices.length;
  at(".none").hidden = card.slices.length > 0;
  const many = card.slices.length === 1 ? "1 lease" : `${card.slices.length} leases`;
  const free = `${bytes(card.available_bytes)} can be granted`;
  at(".bar").setAttribute("aria-label", `${name}: ${many}, ${bytes(leased)}; ${free}`);
  arrange(at(".bar"), slices, piecesOf(card, leased), (piece) => piece.key, makePiece);
  for (const piece of piecesOf(card, leased)) drawPiece(slices.get(piece.key), piece);
  at(".bar").classList.toggle("dense", card.slices.length >= DENSE);
  keepOneStop(at(".bar"));
  arrange(at("tbody"), rows, card.slices, (slice) => slice.key, () => copyOf("row-template"));
  for (const slice of card.slices) drawRow(rows.get(slice.key), slice);
  drawRate(at(".rate"), card.launches_per_s);
}

/** All of a card's bytes, left to right: leases, what their contexts take, what is fenced, ready, free. */
function piecesOf(card, leased) {
  const live = card.slices.filter((slice) => slice.state !== "fenced");
  const fenced = card.slices.filter((slice) => slice.state === "fenced");
  const piece = (slice) => ({ key: slice.key, size: slice.size_bytes, slice, looks: looksOf(slice) });
  const rest = (key, size, text) => ({ key, size: Math.max(0, size), text, looks: [key] });
  const overhead = card.held_bytes - leased;
  const each = card.slices.length ? overhead / card.slices.length : 0;
  const stuck = card.fenced_bytes - fenced.reduce((sum, slice) => sum + slice.size_bytes + each, 0);
  const free = card.capacity_bytes - card.held_bytes - Math.max(0, stuck) - card.warm_bytes;
  return [
    ...live.map(piece),
    rest("overhead", overhead, "contexts' own"),
    ...fenced.map(piece),
    rest("fenced", stuck, "fenced"),
    rest("warm", card.warm_bytes, `${card.warm_contexts} made ahead`),
    rest("free", free, "free"),
  ].filter((one) => one.size > 0);
}

function makePiece(piece) {
  const element = document.createElement(piece.slice ? "button" : "span");
  if (piece.slice) {
    element.type = "button";
    element.tabIndex = -1;
    element.dataset.key = piece.slice.key;
  }
  for (let line = 0; line < 2; line += 1) {
    const label = document.createElement("span");
    label.className = "label";
    element.append(label);
  }
  return element;
}

function drawPiece(element, piece) {
  const marked = element.classList.contains("marked") ? ["marked"] : [];
  dress(element, "slice", ...piece.looks, ...marked);
  if (element.style.flexGrow !== String(piece.size)) element.style.flexGrow = piece.size;
  const title = piece.slice ? piece.slice.tenant : piece.text;
  say(element.children[0], title);
  say(element.children[1], bytes(piece.size));
  const about = piece.slice ? `${title}, ${bytes(piece.size)}, ${stateOf(piece.slice)}` : `${title}, ${bytes(piece.size)}`;
  if (element.title !== about) {
    element.title = about;
    element.setAttribute("aria-label", about);
  }
}

function drawRow(row, slice) {
  row.dataset.key = slice.key;
  dress(row.querySelector(".key"), "key", "slice", ...looksOf(slice));
  say(row.querySelector(".tenant"), slice.tenant);
  say(row.querySelector(".id"), slice.lease_id ?? "");
  say(row.querySelector(".size"), bytes(slice.size_bytes));
  const told = row.querySelector(".state");
  say(told, stateOf(slice));
  told.title = slice.reason ?? "";
  told.classList.toggle("is-fenced", slice.state === "fenced");
  const rate = slice.state === "fenced" ? null : slice.launches_per_s ?? null;
  say(row.querySelector(".launches"), rate === null ? "" : integer.format(Math.round(rate)));
  const button = row.querySelector(".revoke");
  button.hidden = !slice.lease_id || !["pending", "active"].includes(slice.state);
  button.setAttribute("aria-label", `Revoke lease ${slice.lease_id ?? ""} of ${slice.tenant}`);
  row.slice = slice;
}

function drawRate(figure, rates) {
  const last = rates.length ? rates[rates.length - 1] : null;
  const most = Math.max(1, ...rates.map((rate) => rate ?? 0));
  const [width, height, room] = [120, 24, 60];
  const x = (index) => (width * (index + room - rates.length)) / (room - 1);
  const y = (rate) => height - 2 - ((height - 4) * rate) / most;
  let [line, area, from] = ["", "", null];
  rates.forEach((rate, index) => {
    if (rate === null) {
      from = null;
      return;
    }
    line += `${from === null ? "M" : "L"}${x(index).toFixed(1)} ${y(rate).toFixed(1)}`;
    if (from !== null) {
      const [left, right] = [x(from).toFixed(1), x(index).toFixed(1)];
      area += `M${left} ${height}L${left} ${y(rates[from]).toFixed(1)}L${right} ${y(rate).toFixed(1)}L${right} ${height}Z`;
    }
    from = index;
  });
  figure.querySelector(".line").setAttribute("d", line);
  figure.querySelector(".area").setAttribute("d", area);
  const text = last === null ? "launches/s" : `${integer.format(Math.round(last))} launches/s`;
  say(figure.querySelector("figcaption"), text);
  figure.querySelector("svg").setAttribute("aria-label", `${text}, in the last minute at most ${integer.format(Math.round(most))}`);
}

function drawEvents(list) {
  const shown = list.filter((event) => event.phase !== "teardown");
  const box = by("events");
  const [top, height] = [box.scrollTop, box.scrollHeight];
  arrange(box, events, shown, (event) => event.number, () => copyOf("event-template"));
  // Who has scrolled down goes on seeing the same.
  if (top > 0) box.scrollTop = top + box.scrollHeight - height;
  for (const event of shown) {
    const item = events.get(event.number);
    const at = (selector) => item.querySelector(selector);
    dress(at(".key"), "key", "slice", ...coloursOf(event.tenant));
    say(at(".tenant"), event.tenant || "a lease");
    say(at(".phase"), PHASES[event.phase] ?? event.phase);
    say(at(".why"), [spaced(event.cause), event.reason].filter(Boolean).join(": "));
    item.ageS = event.age_s;
  }
  by("no-events").hidden = shown.length > 0;
}

function draw(next) {
  state = next;
  arrivedMs = performance.now();
  giveColours(new Set(next.cards.flatMap((card) => card.slices.map((slice) => slice.tenant))));
  document.body.classList.toggle("named", next.named);
  say(by("names"), next.named ? "Hide names" : "Show names");
  say(by("version"), next.version.replace("gpuleased/", ""));
  const leases = next.cards.reduce((sum, card) => sum + card.slices.length, 0);
  const tenants = colours.size === 1 ? "1 tenant" : `${colours.size} tenants`;
  say(by("totals"), leases ? `${leases === 1 ? "1 lease" : `${leases} leases`} of ${tenants}` : "no leases");
  const known = new Map([...cards].map(([uuid, card]) => [uuid, card.own.element]));
  arrange(by("cards"), known, next.cards, (card) => card.uuid, (card) => {
    const element = copyOf("card-template");
    cards.set(card.uuid, { own: { element, slices: new Map(), rows: new Map() } });
    return element;
  });
  for (const uuid of cards.keys()) if (!known.has(uuid)) cards.delete(uuid);
  next.cards.forEach(drawCard);
  drawEvents(next.events);
  tick();
}

// --- time ---

function tick() {
  const nowMs = performance.now();
  const sinceS = (nowMs - arrivedMs) / 1000;
  tellStatus(nowMs);
  if (state === null) return;
  for (const { own } of cards.values()) for (const row of own.rows.values()) countDown(row, sinceS);
  for (const item of events.values()) say(item.querySelector(".ago"), age(item.ageS + sinceS));
  by("drain").hidden = state.drain_left_s === null;
  if (state.drain_left_s !== null) {
    const leftS = Math.max(0, state.drain_left_s - sinceS);
    const when = leftS ? `what is left ends in ${timeLeft(Math.ceil(leftS))}` : "what was left is ended";
    say(by("drain"), `This host is being drained: it grants nothing, and ${when}.`);
  }
}

function countDown(row, sinceS) {
  const slice = row.slice;
  say(row.querySelector(".age:not(th)"), age(slice.age_s + sinceS));
  const isCounted = slice.remaining_s !== null;
  row.querySelector(".left").style.visibility = isCounted ? "visible" : "hidden";
  if (!isCounted) {
    say(row.querySelector(".seconds"), "–");
    row.classList.remove("soon");
    return;
  }
  const leftS = Math.max(0, slice.remaining_s - sinceS);
  const part = slice.ttl_s > 0 ? Math.min(1, leftS / slice.ttl_s) : 0;
  row.querySelector(".fill").style.transform = `scaleX(${part.toFixed(4)})`;
  say(row.querySelector(".seconds"), timeLeft(leftS));
  row.classList.toggle("soon", leftS <= Math.min(slice.ttl_s * SOON, SOON_S));
}

function tellStatus(nowMs) {
  const isOld = !isFed || nowMs - arrivedMs > STALE_MS;
  const isLost = !isConnected || (isOld && state !== null);
  document.body.classList.toggle("live", isConnected && !isOld);
  document.body.classList.toggle("lost", isLost && (state !== null || why !== ""));
  if (isConnected && !isOld) say(by("status"), "Live");
  else if (isConnected) say(by("status"), nowMs - openedMs < STALE_MS ? "Connecting" : "The daemon does not answer.");
  else if (why || state !== null) say(by("status"), `No connection to the daemon${why ? ` (${why})` : ""}, trying again.`);
  const seconds = Math.floor((nowMs - arrivedMs) / 1000);
  say(by("since"), isLost && state !== null ? `What is shown is ${age(seconds)} old.` : "");
}

// --- the stream ---

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function keepConnected() {
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    try {
      await follow(() => (pauseMs = FIRST_PAUSE_MS));
      why = "";
    } catch (error) {
      why = error.name === "AbortError" ? "" : error.told ?? "";
    }
    isConnected = isFed = false;
    tick();
    await pause(pauseMs * (0.75 + Math.random() / 2));
    pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
  }
}

async function follow(onState) {
  connection = new AbortController();
  heardMs = performance.now();
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch("/api/v1/events", { headers, cache: "no-store", signal: connection.signal });
  if (answer.status === 401) {
    sessionStorage.removeItem(TOKEN);
    askForToken(await answer.text());
  }
  if (!answer.ok) throw Object.assign(new Error(), { told: `status ${answer.status}` });
  isConnected = true;
  openedMs = performance.now();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heardMs = performance.now();
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (!lines.includes("event: state")) continue;
      isFed = true;
      draw(JSON.parse(data.join("\n")));
      onState();
    }
  }
}

// --- names ---

function askForToken(error) {
  say(by("token-error"), error.trim());
  if (!by("token-dialog").open) by("token-dialog").showModal();
  by("token").focus();
}

function useToken(token) {
  by("token").value = "";
  if (token && !SENDABLE.test(token)) {
    askForToken("This is not the operator's token: it has a character that none can have.");
    return;
  }
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
  by("token-dialog").close();
  connection?.abort();
}

by("names").addEventListener("click", () => (state?.named ? useToken("") : askForToken("")));
by("token-use").addEventListener("click", () => useToken(by("token").value.trim()));
by("token-cancel").addEventListener("click", () => by("token-dialog").close());
by("token").addEventListener("keydown", (event) => {
  if (event.key === "Enter") useToken(by("token").value.trim());
});

// --- revoking: what is asked for is what the dialog says, however the page goes on meanwhile ---

const OUTCOMES = {
  torndown: "The lease is torn down and its memory is free.",
  fenced: "The lease is over, but its memory could not be proved free and is fenced.",
  notfound: "There is no such lease any more.",
};
let asked = ""; // the lease's id

function askToRevoke(slice) {
  asked = slice.lease_id;
  say(by("revoke-lease"), slice.lease_id);
  say(by("revoke-tenant"), slice.tenant);
  say(by("revoke-size"), bytes(slice.size_bytes));
  by("revoke-reason").value = "";
  tellOfRevoking("", false);
  by("revoke-do").disabled = by("revoke-reason").disabled = false;
  say(by("revoke-cancel"), "Cancel");
  by("revoke-dialog").showModal();
  // Whoever presses Enter without looking has ended nothing.
  by("revoke-cancel").focus();
}

function tellOfRevoking(text, isFailure) {
  say(by("revoke-told"), text);
  by("revoke-told").classList.toggle("failed", isFailure);
}

async function revoke(leaseId) {
  const of = () => asked === leaseId && by("revoke-dialog").open;
  by("revoke-do").disabled = by("revoke-reason").disabled = true;
  tellOfRevoking("Being revoked …", false);
  const reason = by("revoke-reason").value.trim();
  const where = `/api/v1/leases/${leaseId}${reason ? `?reason=${encodeURIComponent(reason)}` : ""}`;
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(TOKEN) ?? ""}` };
  let [told, isDone] = ["", false];
  try {
    const answer = await fetch(where, { method: "DELETE", headers, cache: "no-store" });
    const isOutcome = answer.headers.get("content-type") === "application/json";
    const outcome = isOutcome ? (await answer.json()).outcome : "";
    told = isOutcome ? (OUTCOMES[outcome] ?? `The daemon says: ${outcome}`) : (await answer.text()).trim();
    isDone = isOutcome && outcome !== "fenced";
  } catch {
    told = "No connection to the daemon: look whether the lease is still there.";
  }
  if (!of()) return;
  tellOfRevoking(told, !isDone);
  by("revoke-do").disabled = by("revoke-reason").disabled = isDone;
  say(by("revoke-cancel"), "Close");
  by("revoke-cancel").focus();
}

by("cards").addEventListener("click", (event) => {
  const slice = event.target.closest(".revoke")?.closest("tr").slice;
  if (slice?.lease_id) askToRevoke(slice);
});
by("revoke-do").addEventListener("click", () => revoke(asked));
by("revoke-cancel").addEventListener("click", () => by("revoke-dialog").close());

// --- a card's bar: one stop for the Tab key, arrows within, Enter to the lease's row ---

function keepOneStop(bar) {
  const slices = [...bar.querySelectorAll("button")];
  if (slices.length && !slices.some((slice) => slice.tabIndex === 0)) slices[0].tabIndex = 0;
}

function mark(key, isMarked) {
  for (const { own } of cards.values()) {
    own.slices.get(key)?.classList.toggle("marked", isMarked);
    own.rows.get(key)?.classList.toggle("marked", isMarked);
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

setInterval(() => {
  tick();
  if (isConnected && performance.now() - heardMs > SILENT_MS) connection.abort();
}, TICK_MS);
keepConnected();
