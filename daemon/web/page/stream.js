// The stream of states from the daemon. The page opens a new one whenever it ends.

const SILENT_MS = 10000; // A stream sends something every three seconds; a silent one is aborted.
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5000;
const TOKEN = "gpulease-token";

export const stream = {
  isConnected: false,
  isFed: false, // whether this stream has sent a state
  openedMs: 0,
  heardMs: 0, // the last arrival of anything
  why: "", // why there is no stream
};

let connection = null;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

/** Returns the headers of a request, with the operator's token if there is one. */
export function bearer() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/** Uses another token from now on, "" for none. */
export function keepToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
  connection?.abort();
}

/** Follows the stream for ever. `onState` gets each state, `onRefused` the reason why a token is refused. */
export async function keepConnected(onState, onRefused, onEnd) {
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    const onFirstState = (state) => {
      pauseMs = FIRST_PAUSE_MS;
      onState(state);
    };
    try {
      await follow(onFirstState, onRefused);
      stream.why = "";
    } catch (error) {
      stream.why = error.name === "AbortError" ? "" : error.status ?? "";
    }
    stream.isConnected = stream.isFed = false;
    onEnd();
    await pause(pauseMs * (0.75 + Math.random() / 2));
    pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
  }
}

async function follow(onState, onRefused) {
  connection = new AbortController();
  stream.heardMs = performance.now();
  const answer = await fetch("/api/v1/events", { headers: bearer(), cache: "no-store", signal: connection.signal });
  if (answer.status === 401) {
    sessionStorage.removeItem(TOKEN);
    onRefused(await answer.text());
  }
  if (!answer.ok) throw Object.assign(new Error(), { status: `status ${answer.status}` });
  stream.isConnected = true;
  stream.openedMs = performance.now();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    stream.heardMs = performance.now();
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      if (!lines.includes("event: state")) continue;
      const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      stream.isFed = true;
      onState(JSON.parse(data.join("\n")));
    }
  }
}

/** Aborts a stream that has been silent for too long. */
export function abortIfSilent() {
  if (stream.isConnected && performance.now() - stream.heardMs > SILENT_MS) connection.abort();
}
