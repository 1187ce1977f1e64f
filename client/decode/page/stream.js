// The stream of states from the decode server, and the key. The page opens a new stream whenever one ends.

const PAUSE_MS = 100; // A stream ends every ten seconds by itself; the next one begins at once.
const RETRY_MS = 2000;
const KEY = "gpulease-decode-key";
const FRAGMENT = "#key=";

/** Takes the key out of the address, so that no screen and no history shows it. */
export function takeKey() {
  if (!location.hash.startsWith(FRAGMENT)) return;
  sessionStorage.setItem(KEY, decodeURIComponent(location.hash.slice(FRAGMENT.length)));
  history.replaceState(null, "", location.pathname);
}

export const keepKey = (key) => sessionStorage.setItem(KEY, key);

export const bearer = () => ({ Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` });

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Follows the stream until the key is refused. `onState` gets each state, `onLost` the reason for a pause. */
export async function follow(onState, onLost, onRefused) {
  for (;;) {
    try {
      const answer = await fetch("/page/events", { headers: bearer(), cache: "no-store" });
      if (answer.status === 401) {
        onRefused(sessionStorage.getItem(KEY) === null ? "" : "The server does not know this key.");
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      await read(answer, onState);
      await pause(PAUSE_MS);
    } catch (error) {
      onLost(error.message);
      await pause(RETRY_MS);
    }
  }
}

async function read(answer, onState) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    // Of several states that came together the last one is enough.
    if (parts.length) onState(JSON.parse(parts.pop().slice("data: ".length)));
  }
}

/** Ends a tenant's region. Returns "" if that was done, else why not. */
export async function revoke(tenant) {
  try {
    const path = `/page/tenants/${encodeURIComponent(tenant)}/region`;
    const answer = await fetch(path, { method: "DELETE", headers: bearer(), cache: "no-store" });
    return answer.ok ? "" : (await answer.json()).detail;
  } catch {
    return "No connection to the server.";
  }
}
