// The list of what happened last.

import { arrange, by, copyOf, dress, paint, say } from "./elements.js";
import { happened, span } from "./words.js";

const items = new Map(); // by the event's number

/** Draws the events of a state, of those leases that `isWanted`. */
export function drawEvents(list, isWanted) {
  const shown = list.filter(isWanted);
  const box = by("events");
  const [top, height] = [box.scrollTop, box.scrollHeight];
  arrange(box, items, shown, (event) => event.number, () => copyOf("event-template"));
  // Who has scrolled down goes on seeing the same.
  if (top > 0) box.scrollTop = top + box.scrollHeight - height;
  for (const event of shown) {
    const item = items.get(event.number);
    const at = (selector) => item.querySelector(selector);
    dress(at(".key"), "key", "slice", ...(event.tenant ? ["owned"] : []));
    paint(at(".key"), event.tenant);
    say(at(".tenant"), event.tenant || "a lease");
    say(at(".phase"), happened(event));
    say(at(".why"), event.reason ?? "");
    item.ageS = event.age_s;
  }
  by("no-events").hidden = shown.length > 0;
  say(by("no-events"), list.length ? "None of these." : "Nothing has happened yet.");
}

/** Lets their ages go on. */
export function ageEvents(sinceS) {
  for (const item of items.values()) say(item.querySelector(".ago"), span(Math.floor(item.ageS + sinceS)));
}
