// Sizes, times and states as text, in the words of the command line (`gpulease leases`).

export const ID_CHARS = 8; // The part of a lease's id that `gpulease top` shows and commands accept.
const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const PHASES = { active: "began", warning: "was warned", grace: "is ending", teardown: "is being torn down", ended: "ended" };
const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Formats bytes, rounded to three digits: "1.5 GiB". */
export function size(bytes) {
  const [unit, scale] = UNITS.find(([, least]) => bytes >= least) ?? ["B", 1];
  const tens = bytes < 10 * scale ? 100 : bytes < 100 * scale ? 10 : 1;
  return `${Math.floor((bytes * tens) / scale + 0.5) / tens} ${unit}`;
}

/** Formats a time span: "2 h 05 min", "3 min 20 s", "4.2 s". */
export function span(seconds) {
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ${two((seconds % 3600) / 60)} min`;
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  return `${seconds.toFixed(1)} s`;
}

export const rate = (perSecond) => integer.format(perSecond);

export const count = (number, one, many = `${one}s`) => `${integer.format(number)} ${number === 1 ? one : many}`;

/** Returns the words for a lease's state. No other place words it. */
export function stateOf(slice) {
  if (slice.state === "fenced") return "fenced";
  if (slice.state === "pending") return "starting";
  if (slice.state === "draining") return slice.cause ? `ending, ${spaced(slice.cause)}` : "ending";
  if (slice.orphaned_in_s != null) return `orphaned, ends in ${span(slice.orphaned_in_s)}`;
  const warmOnly = slice.is_warm_only ? ", warm only" : "";
  if (slice.parked_for_s != null) return `parked for ${span(slice.parked_for_s)}${warmOnly}`;
  return `${slice.phase === "warning" ? "active, warned" : "active"}${warmOnly}`;
}

/** Returns the words for a lease's change; its end is one event. */
export function happened(event) {
  const what = PHASES[event.phase] ?? event.phase;
  return event.cause && event.phase !== "active" ? `${what}, ${spaced(event.cause)}` : what;
}

const spaced = (word) => String(word).replaceAll("_", " ");
