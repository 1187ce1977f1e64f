// The decode server's page: it takes states from /page/events and draws them.

import { keepHistory } from "./history.js";
import { follow, keepKey, takeKey } from "./stream.js";
import { arrange, by, copyOf, drawTenants, number, paint, say } from "./tenants.js";

const events = new Map();
const models = new Map();
const prefixes = new Map();

function onState(state) {
  if (state.serving) lamp("live", "Live");
  else lamp("lost", "The engine was lost; another one is being opened.");
  // A tenant sees itself alone, and not where the server runs.
  const isOperator = state.viewer === null;
  const served = isOperator ? `${state.model} on ${state.host}` : `${state.model}, as ${state.viewer} sees it`;
  document.title = `${served} - gpulease decode`;
  say(by("served"), served);
  say(by("total-rate"), number(state.tokens_s));
  say(by("total-live"), number(state.live));
  say(by("total-waiting"), number(state.waiting));
  say(by("total-refused"), number(state.refused));
  by("total-steps").parentElement.hidden = !isOperator;
  say(by("total-steps"), number(state.steps ?? 0));
  drawModels(state.models);
  drawPrefixes(state.prefixes, state.models.length > 0);
  drawTenants(state.tenants, isOperator);
  drawEvents(state.events);
}

function drawModels(items) {
  // A server with one model names it in its title.
  by("models-section").hidden = items.length === 0;
  arrange(by("models"), models, items, (model) => model.id, makeModel);
  for (const model of items) {
    const element = models.get(model.id);
    element.dataset.state = model.state;
    const state = model.engine_lost ? "engine lost" : model.state;
    say(element.querySelector(".state"), model.reason ? `${state}: ${model.reason}` : state);
    say(element.querySelector(".use"), `${number(model.in_use)} in use, ${number(model.waiting)} waiting, ${number(model.memory_bytes / 2 ** 20)} MiB`);
  }
}

function makeModel(model) {
  const element = copyOf("model-template");
  say(element.querySelector(".name"), model.id);
  return element;
}

function drawPrefixes(items, hasModels) {
  by("prefixes-section").hidden = items.length === 0;
  // Of several models, each computes the prefix for itself.
  const nameOf = (prefix) => (hasModels ? `${prefix.name} of ${prefix.model}` : prefix.name);
  arrange(by("prefixes"), prefixes, items, nameOf, (prefix) => makeModel({ id: nameOf(prefix) }));
  for (const prefix of items) {
    const element = prefixes.get(nameOf(prefix));
    const isShared = prefix.region_bytes > 0;
    element.dataset.state = isShared ? "loaded" : "failed";
    say(element.querySelector(".state"), isShared ? "shared" : "ended");
    say(element.querySelector(".use"), `requests: ${number(prefix.requests)}, tokens reused: ${number(prefix.reused_tokens)}, holds ${number(prefix.tokens)} tokens in ${number(prefix.region_bytes / 2 ** 20)} MiB`);
  }
}

function drawEvents(items) {
  by("no-events").hidden = items.length > 0;
  arrange(by("events"), events, items, (event) => event.number, makeEvent);
  for (const event of items) {
    // Similar events are merged into one, and its text changes.
    say(events.get(event.number).querySelector(".words"), event.text);
    say(events.get(event.number).querySelector(".ago"), `${number(event.ago_s)} s ago`);
  }
}

function makeEvent(event) {
  const element = copyOf("event-template");
  if (event.tenant) paint(element.querySelector(".key"), event.tenant);
  else element.querySelector(".key").remove();
  say(element.querySelector(".who"), event.tenant);
  return element;
}

function lamp(kind, words) {
  document.body.className = kind;
  say(by("status"), words);
}

function onRefused(why) {
  lamp("lost", "This page requires a key: the operator's, or a tenant's.");
  by("key-form").hidden = false;
  say(by("key-error"), why);
  by("key").focus();
}

function start() {
  follow(onState, (why) => lamp("lost", `No connection to the server (${why}), trying again.`), onRefused);
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(by("key").value.trim());
  by("key").value = "";
  by("key-form").hidden = true;
  start();
});

addEventListener("hashchange", () => location.reload());
takeKey();
start();
keepHistory();
