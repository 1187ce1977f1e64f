// Tenants' colours: no two tenants on the page have the same, as long as there are enough.

const HUES = 12;
const FIRST_HUE = 50; // Red means that something is wrong.
const HUE_STEP = 25;
const TONES = 3;
const COLOURS = HUES * TONES;

const colours = new Map(); // by tenant, of those on the page

/** Gives each tenant on the page a colour. Whoever has one keeps it; one who leaves the page gives it back. */
export function assignColours(tenants) {
  const present = new Set(tenants);
  for (const tenant of colours.keys()) if (!present.has(tenant)) colours.delete(tenant);
  const uses = new Array(COLOURS).fill(0);
  for (const colour of colours.values()) uses[colour] += 1;
  for (const tenant of [...present].sort()) {
    if (colours.has(tenant)) continue;
    // The name's own colour, or else the next that fewest have: the same tenants get the same colours on a new page.
    const first = hashOf(tenant) % COLOURS;
    const order = Array.from({ length: COLOURS }, (_, step) => (first + step) % COLOURS);
    const fewest = Math.min(...uses);
    const colour = order.find((one) => uses[one] === fewest);
    colours.set(tenant, colour);
    uses[colour] += 1;
  }
}

/** Gives an element its tenant's colour. */
export function paint(element, tenant) {
  const colour = colours.get(tenant) ?? 0;
  if (element.dataset.painted === String(colour)) return;
  element.dataset.painted = colour;
  element.style.setProperty("--hue", FIRST_HUE + HUE_STEP * (colour % HUES));
  element.style.setProperty("--tone", `var(--tone-${Math.floor(colour / HUES)})`);
}

/** Returns FNV-1a with MurmurHash3's finalizer: names that differ in one letter get different colours. */
function hashOf(text) {
  let hash = 0x811c9dc5;
  for (const unit of new TextEncoder().encode(text)) hash = Math.imul(hash ^ unit, 0x01000193);
  hash = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
  return (hash ^ (hash >>> 16)) >>> 0;
}
