// An operator's actions: show names with a token, revoke leases, drain the host, clear fences.
//
// An action does what its dialog said, even if the page changed meanwhile. It goes to the broker with the token, and the
// broker checks the token.

import { by, say } from "./elements.js";
import { bearer, keepToken } from "./stream.js";
import { count, size, span } from "./format.js";

const SENDABLE = /^[!-~]+$/; // With other characters, such as those copied from a text, fetch fails as if there were no daemon.
const DRAIN_MIN = 10;
const MOST_DRAIN_MIN = 71582; // The longest time that the protocol's DRAIN can hold.

// --- names ---

export function askForToken(error = "") {
  say(by("token-error"), error.trim());
  if (!by("token-dialog").open) by("token-dialog").showModal();
  by("token").focus();
}

// The form's submit event, not a key: Enter belongs to the field and ends when the dialog closes.
by("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = by("token").value.trim();
  by("token").value = "";
  if (token && !SENDABLE.test(token)) {
    askForToken("This is not the operator's token: it contains a character that tokens can't have.");
    return;
  }
  by("token-dialog").close();
  keepToken(token);
});
by("token-cancel").addEventListener("click", () => by("token-dialog").close());

// --- actions, each confirmed in one dialog ---

let asked = null; // the action that the dialog confirms

/**
 * Asks the operator to confirm an action.
 *
 * An action has a `title`, `about` (texts and elements), a `field` (label, value, type) or null, and the `word` on its
 * button. Its `request` turns the field's text into method and path. Its `outcome` turns the answer's JSON into text and
 * isDone.
 */
function ask(action) {
  asked = action;
  say(by("act-title"), action.title);
  by("act-about").replaceChildren(...action.about);
  by("act-field").hidden = action.field === null;
  if (action.field !== null) {
    say(by("act-label"), action.field.label);
    Object.assign(by("act-input"), { type: "text", min: "", max: "" }, action.field.input);
  }
  say(by("act-do"), action.word);
  report("", false);
  by("act-do").disabled = by("act-input").disabled = false;
  say(by("act-cancel"), "Cancel");
  by("act-dialog").showModal();
  // An operator who presses Enter without looking cancels.
  by("act-cancel").focus();
}

function report(text, isFailure) {
  say(by("act-told"), text);
  by("act-told").classList.toggle("failed", isFailure);
}

async function perform(action) {
  if (!by("act-input").checkValidity()) {
    report(by("act-input").validationMessage, true);
    return;
  }
  by("act-do").disabled = by("act-input").disabled = true;
  report("In progress …", false);
  const [method, path] = action.request(by("act-input").value.trim());
  let outcome = { text: "", isDone: false };
  try {
    const answer = await fetch(path, { method, headers: bearer(), cache: "no-store" });
    const isOutcome = answer.headers.get("content-type") === "application/json";
    outcome = isOutcome ? action.outcome(await answer.json()) : { text: (await answer.text()).trim(), isDone: false };
  } catch {
    outcome = { text: "The connection to the daemon was lost: check on this page whether the request took effect.", isDone: false };
  }
  if (asked !== action || !by("act-dialog").open) return;
  report(outcome.text, !outcome.isDone);
  by("act-do").disabled = by("act-input").disabled = outcome.isDone;
  say(by("act-cancel"), "Close");
  by("act-cancel").focus();
}

by("act-do").addEventListener("click", () => perform(asked));
by("act-cancel").addEventListener("click", () => by("act-dialog").close());

function mark(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

const OUTCOMES = {
  torndown: { text: "The lease has ended, and its memory is free.", isDone: true },
  fenced: { text: "The lease has ended, but its memory could not be proved free and is fenced.", isDone: false },
  notfound: { text: "The lease no longer exists.", isDone: true },
};

export function askToRevoke(slice) {
  const about = ["Lease ", mark("code", slice.lease_id), " of tenant ", mark("bdi", slice.tenant)];
  ask({
    title: "Revoke this lease?",
    about: [...about, `, ${size(slice.size_bytes)}, ends at once, even while a kernel runs. Its data on the card is lost.`],
    field: { label: "Reason for its tenant (optional)", input: { value: "", maxLength: 512 } },
    word: "Revoke",
    request: (reason) => {
      const query = reason ? `?reason=${encodeURIComponent(reason)}` : "";
      return ["DELETE", `/api/v1/leases/${slice.lease_id}${query}`];
    },
    outcome: ({ outcome }) => OUTCOMES[outcome] ?? { text: `The daemon says: ${outcome}`, isDone: false },
  });
}

/** Asks whether to drain a card; the host without one. */
export function askToDrain(card) {
  ask({
    title: card ? `Drain GPU ${card.index}?` : "Drain this host?",
    about: [
      `No new leases are granted ${card ? "on this card " : ""}from now on, tenants are warned, and every lease that is left `,
      `${card ? "there " : ""}at the deadline is ended.`,
    ],
    field: {
      label: `Minutes until the remaining leases are ended (0 to ${MOST_DRAIN_MIN})`,
      input: { type: "number", min: "0", max: String(MOST_DRAIN_MIN), value: String(DRAIN_MIN) },
    },
    word: "Drain",
    request: (minutes) => ["PUT", `${pathOfDrain(card)}?within_s=${Math.round(Number(minutes) * 60)}`],
    outcome: (report) => outcomeOfDrain(report, card),
  });
}

export function askToEndDrain(card) {
  ask({
    title: "End the drain?",
    about: ["New leases are granted again, and those that are left keep the time they had."],
    field: null,
    word: "End the drain",
    request: () => ["DELETE", pathOfDrain(card)],
    outcome: (report) => outcomeOfDrain(report, card),
  });
}

const pathOfDrain = (card) => (card ? `/api/v1/drain/${card.uuid}` : "/api/v1/drain");

function outcomeOfDrain({ draining, left_s, leases }, card) {
  const what = card ? `GPU ${card.index}` : "The host";
  if (!draining) return { text: `${what} is not drained: it grants leases.`, isDone: true };
  const left = leases ? `${count(leases, "lease is", "leases are")} left, and will end within ${span(left_s)}` : "No lease is left";
  return { text: `${what} grants no more leases. ${left}.`, isDone: true };
}

export function askToClearFences(card) {
  ask({
    title: "Clear the fence?",
    about: [
      `${size(card.fenced_bytes)} of GPU ${card.index} could not be proved free. If you clear the fence, they can be granted again: `,
      "first check with ", mark("code", "nvidia-smi"), " that no process uses them.",
    ],
    field: null,
    word: "Clear the fence",
    request: () => ["DELETE", `/api/v1/fences/${card.uuid}`],
    outcome: ({ cleared }) => ({ text: `${count(cleared, "fenced slice was", "fenced slices were")} cleared.`, isDone: true }),
  });
}
