// The list of the leases' latest changes.

import { paint } from "./colours.js";
import { arrange, by, copyOf, dress, say } from "./elements.js";
import { happened, ID_CHARS, size, span } from "./format.js";

const items = new Map(); // by the event's number

/** Draws a state's events for which `isWanted` holds. `cards` has the cards' names by UUID. */
export function drawEvents(list, isWanted, cards) {
  const shown = list.filter(isWanted);
  const box = by("events");
  const [top, height] = [box.scrollTop, box.scrollHeight];
  arrange(box, items, shown, (event) => event.number, () => copyOf("event-template"));
  // A reader who has scrolled down keeps seeing the same events.
  if (top > 0) box.scrollTop = top + box.scrollHeight - height;
  for (const event of shown) {
    const item = items.get(event.number);
    const at = (selector) => item.querySelector(selector);
    dress(at(".key"), "key", "slice", ...(event.tenant ? ["owned"] : []));
    paint(at(".key"), event.tenant);
    say(at(".tenant"), event.tenant || "a lease");
    say(at(".phase"), happened(event));
    const id = event.lease_id ?? "";
    say(at(".id code"), id.slice(0, ID_CHARS));
    at(".id code").title = id;
    const what = event.is_region ? "region of " : "";
    const of = event.size_bytes === null ? "" : `${what}${size(event.size_bytes)}`;
    say(at(".where"), [of, cards.get(event.card_uuid) ?? ""].filter((text) => text).join(" on "));
    say(at(".why"), event.reason ?? "");
    item.ageS = event.age_s;
  }
  by("no-events").hidden = shown.length > 0;
  say(by("no-events"), list.length ? "None of these." : "Nothing has happened yet.");
}

/** Advances the events' ages to `sinceS` seconds after the state. */
export function ageEvents(sinceS) {
  for (const item of items.values()) say(item.querySelector(".ago"), span(Math.floor(item.ageS + sinceS)));
}
