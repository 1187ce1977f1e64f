// Plots of each card's last minutes, an hour at most: its utilisation, and its leased and used memory.
//
// Unknown figures are not drawn: a missing figure has no line, and a missing sample leaves a gap.

import { label, say } from "./elements.js";
import { bearer } from "./stream.js";
import { size } from "./format.js";

const EVERY_MS = 10000; // The daemon takes a sample so often.
const [WIDTH, HEIGHT] = [600, 100]; // The drawing's size; the browser stretches it to its place.

const SPANS_MIN = [4, 12, 20, 40]; // A daemon that has not run for an hour yet fills its plots all the same.

let history = null;
let spanS = 60 * SPANS_MIN[0];

/** Keeps the plots up to date; `onNew` is called with each answer in place. */
export async function keepHistory(onNew) {
  for (;;) {
    try {
      const answer = await fetch("/api/v1/history", { headers: bearer(), cache: "no-store" });
      if (answer.ok) {
        history = await answer.json();
        lookAtSpan();
        onNew();
      }
    } catch {
      // The stream reports that there is no connection.
    }
    // Ask again soon while there is nothing: a daemon takes its first sample as it starts.
    const isEmpty = Object.keys(history?.cards ?? {}).length === 0;
    await new Promise((resolve) => setTimeout(resolve, isEmpty ? EVERY_MS / 10 : EVERY_MS));
  }
}

/** Takes the shortest span that holds all samples: the plots of all cards have the same. */
function lookAtSpan() {
  const oldestS = Math.max(0, ...Object.values(history?.cards ?? {}).map((lines) => lines.age_s[0] ?? 0));
  spanS = 60 * (SPANS_MIN.find((minutes) => oldestS <= 60 * minutes) ?? (history?.span_s ?? 3600) / 60);
}

/** Draws a card's two plots into its `.plots`. */
export function drawPlots(place, card) {
  const lines = history?.cards[card.uuid] ?? { age_s: [], utilization_percent: [], used_bytes: [], leased_bytes: [] };
  const [busy, memory] = place.querySelectorAll("figure");
  const isReported = lines.utilization_percent.some((percent) => percent !== null);
  const isMissing = lines.age_s.length > 0 && !isReported;
  busy.classList.toggle("untold", isMissing);
  const percent = (number) => `${number} %`;
  drawPlot(busy, "GPU utilisation", 100, percent, lines.age_s, [["used", lines.utilization_percent, ""]]);
  busy.querySelector(".untold").hidden = !isMissing;
  const most = Math.max(card.capacity_bytes, ...lines.used_bytes.map((bytes) => bytes ?? 0));
  const figures = [["leased", lines.leased_bytes, "leased"], ["used", lines.used_bytes, "used"]];
  drawPlot(memory, "Memory", most, size, lines.age_s, figures);
}

function drawPlot(figure, name, most, words, ages, figures) {
  const at = (selector) => figure.querySelector(selector);
  [most, most / 2, 0].forEach((value, index) => say(figure.querySelectorAll(".y span")[index], words(value)));
  const minutes = spanS / 60;
  [minutes, (3 * minutes) / 4, minutes / 2, minutes / 4].forEach((at, index) =>
    say(figure.querySelectorAll(".x span")[index], index ? String(at) : `${at} min`),
  );
  const summary = [];
  for (const [kind, values, word] of figures) {
    const runs = runsOf(ages, values, most);
    at(`.line.${kind}`).setAttribute("d", runs.map(lineOf).join(""));
    at(`.area.${kind}`)?.setAttribute("d", runs.map(areaOf).join(""));
    const last = values.at(-1) ?? null;
    const text = last === null ? "–" : words(last);
    const now = at(`.now .${kind}`);
    if (now) say(now, word ? `${text} ${word}` : text);
    const highest = Math.max(...values.filter((value) => value !== null));
    if (last !== null) summary.push(`${word} ${text} now, at most ${words(highest)}`.trim());
  }
  label(at("svg"), `${name} over the last ${minutes === 60 ? "hour" : `${minutes} minutes`}: ${summary.join("; ") || "unknown"}`);
}

/** Splits the points into runs, from one gap or unknown figure to the next. */
function runsOf(ages, values, most) {
  const runs = [];
  let before = null;
  ages.forEach((age, index) => {
    const isKnown = values[index] !== null && age <= spanS;
    if (isKnown && (before === null || before - age > history.gap_s)) runs.push([]);
    if (isKnown) runs.at(-1).push([WIDTH * (1 - age / spanS), HEIGHT * (1 - values[index] / most)]);
    before = isKnown ? age : null;
  });
  return runs;
}

const pointOf = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

// A single sample is a dot: a line of no length with round ends.
const lineOf = (run) => `M${run.map(pointOf).join("L")}${run.length === 1 ? "h0.01" : ""}`;

const areaOf = (run) => `M${run[0][0].toFixed(1)} ${HEIGHT}L${run.map(pointOf).join("L")}V${HEIGHT}Z`;
