// Plots of the last hour, or of what there is of it. A slot without a figure leaves a gap.

import { bearer, pause } from "./stream.js";
import { by, kinds, number, say, time } from "./tenants.js";

const EVERY_MS = 5000;
const [WIDTH, HEIGHT, MARGIN] = [600, 60, 3]; // The drawing's size; the browser stretches it to its place.

/** Keeps the plots up to date, as long as there is a key. */
export async function keepHistory() {
  for (;;) {
    try {
      const answer = await fetch("/page/history", { headers: bearer(), cache: "no-store" });
      if (answer.ok) draw(await answer.json());
    } catch {
      // The stream reports that there is no connection.
    }
    await pause(EVERY_MS);
  }
}

function draw(history) {
  const one = (name, lines, words) => drawPlot(by("plots").querySelector(name), history, lines, words);
  one(".tokens", [history.tokens_s], number);
  one(".first", [history.first_token_ms, history.first_token_p99_ms], time);
  one(".gap", [history.gap_ms, history.gap_p99_ms], time);
  one(".refused", [history.refused], number);
  say(by("plots").querySelector(".kinds"), kinds(history.refused_by));
}

/** Draws one or two lines: the figure itself, and its p99. */
function drawPlot(figure, { span_s, age_s }, lines, words) {
  const at = (selector) => figure.querySelector(selector);
  const known = lines.flat().filter((value) => value !== null);
  const most = known.length ? Math.max(...known) : 0;
  lines.forEach((values, line) => {
    figure.querySelectorAll("path")[line].setAttribute("d", pathOf(values, span_s, age_s, most || 1));
  });
  const last = lines.map((values) => values.at(-1) ?? null).filter((value) => value !== null);
  say(at(".now"), last.length ? last.map(words).join("; ") : "–");
  say(at(".from"), `${number(span_s / 60)} min ago`);
  say(at(".most"), known.length ? `at most ${words(most)}` : "");
  const summary = known.length ? `${at(".now").textContent} now, ${at(".most").textContent}` : "nothing yet";
  at("svg").setAttribute("aria-label", `${at("figcaption").textContent}: ${summary}`);
}

function pathOf(values, span_s, age_s, most) {
  let path = "";
  let isGap = true;
  values.forEach((value, slot) => {
    if (value !== null) {
      const [x, y] = [WIDTH * (1 - age_s[slot] / span_s), HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value / most)];
      // A single sample is a dot: a line of no length with round ends.
      path += `${isGap ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}${isGap ? "h0.01" : ""}`;
    }
    isGap = value === null;
  });
  return path;
}
