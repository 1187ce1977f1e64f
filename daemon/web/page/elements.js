// Helpers for the page's elements: find, fill, order and copy them.

const COPIED_MS = 1500;

export const by = (id) => document.getElementById(id);

/** Sets an element's text, as a text node, if it differs. */
export const say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

export const dress = (element, ...names) => {
  const wanted = names.join(" ");
  if (element.className !== wanted) element.className = wanted;
};

export const label = (element, text) => {
  if (element.getAttribute("aria-label") !== text) element.setAttribute("aria-label", text);
};

export const copyOf = (id) => by(id).content.firstElementChild.cloneNode(true);

/** Makes `parent` hold the elements of `items` in order. `known` keeps elements by key; `make` makes a new one. */
export function arrange(parent, known, items, keyOf, make) {
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

/** Copies a button's text to the clipboard and says so, on the button and to screen readers. */
async function copy(button) {
  const isDone = await navigator.clipboard.writeText(button.dataset.copies).then(() => true, () => false);
  say(by("copied"), isDone ? `Copied ${button.dataset.copies}` : "The browser does not let this page copy.");
  button.classList.toggle("done", isDone);
  setTimeout(() => button.classList.remove("done"), COPIED_MS);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button.copy");
  if (button) copy(button);
});
