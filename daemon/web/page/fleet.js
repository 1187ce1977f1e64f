// The node in its fleet: whether it has joined, how long its names last without another beat, and what they are.

import { by, say } from "./elements.js";
import { count, span } from "./format.js";

/** Draws a state's fleet, null for a node without one. */
export function drawFleet(fleet) {
  by("fleet").hidden = fleet === null;
  if (fleet === null) return;
  say(by("fleet-node"), fleet.node);
  say(by("fleet-fenced"), count(fleet.fenced, "time"));
  by("fleet-fenced").parentElement.hidden = fleet.fenced === 0;
  const names = (fleet.names ?? []).map(({ name, epoch }) => `${name} (epoch ${epoch})`);
  say(by("fleet-names"), names.join(", ") || (fleet.served ? String(fleet.served) : "none"));
}

/** Counts the horizon down to `sinceS` seconds after the state. */
export function countDownFleet(fleet, sinceS) {
  if (fleet === null) return;
  const leftS = fleet.horizon_left_s === null ? null : Math.max(0, fleet.horizon_left_s - sinceS);
  const text = leftS === null ? "not joined" : leftS ? `${span(leftS)} left` : "cut off from etcd";
  say(by("fleet-horizon"), text);
  by("fleet-horizon").parentElement.classList.toggle("bad", !leftS);
}
