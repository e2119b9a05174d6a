// The table of the models, and the details of one, which the part of the address after # names.
import { Trial } from "./trial.js";
import { element, replace } from "./elements.js";

const rows = new Map(); // the rows of the table by model
let state = { models: {}, key_header: "" };
let trial = null;
let loaded = ""; // the load that is shown

// The sums of Triton's statistics over the versions of each model.
function totals(statistics) {
  const sums = new Map();
  for (const entry of statistics?.model_stats ?? []) {
    const { success, fail } = entry.inference_stats;
    const sum = sums.get(entry.name) ?? { versions: [], requests: 0, ns: 0, errors: 0, rows: 0, calls: 0 };
    sum.versions.push(entry.version);
    sum.requests += success.count;
    sum.ns += success.ns;
    sum.errors += fail.count;
    sum.rows += entry.inference_count;
    sum.calls += entry.execution_count;
    sums.set(entry.name, sum);
  }
  return sums;
}

const megabytes = (bytes) => (bytes === undefined ? "–" : `${(bytes / 2 ** 20).toFixed(0)} MB`);

function milliseconds(ns) {
  const ms = ns / 1e6;
  return `${ms < 10 ? ms.toFixed(2) : ms.toFixed(0)} ms`;
}

function stateOf(model) {
  return model.reason.split(":")[0] || "serves";
}

// What is known of a model beside numbers; the text is that of models, so it is never HTML.
function notes(model) {
  const texts = [];
  const reason = model.reason.replace(/^[^:]*(: )?/, "");
  if (reason) texts.push(["reason", reason]);
  for (const warning of model.warnings) texts.push(["warning", `Warning: ${warning}`]);
  if (model.failure && !reason) texts.push(["past", `Last failure: ${model.failure}`]);
  return texts.map(([kind, text]) => element("p", { className: kind }, text));
}

class Row {
  constructor(name) {
    // The name of a folder need not be UTF-8.
    this.link = element("a", { href: `#${encodeURIComponent(name.toWellFormed())}` }, name);
    const labels = ["State", "Versions", "Requests", "Errors", "Latency", "Rows per batch", "Instances"];
    this.cells = labels.map((label) => element("td", { dataset: { label } }));
    this.numbers = element("tr", {}, element("th", { scope: "row" }, this.link), ...this.cells);
    this.notes = element("tr", { className: "notes" }, element("td", { colSpan: 8 }));
    this.last = null; // the totals of the last event
    this.recent = ["–", "–"];
  }

  update(model, sum, seconds) {
    let rate = "";
    if (sum && this.last && sum.requests > this.last.requests) {
      const requests = sum.requests - this.last.requests;
      const calls = sum.calls - this.last.calls;
      rate = ` (${(requests / seconds).toFixed(requests < 10 * seconds ? 1 : 0)}/s)`;
      const latency = milliseconds((sum.ns - this.last.ns) / requests);
      this.recent = [latency, calls ? ((sum.rows - this.last.rows) / calls).toFixed(1) : "–"];
    } else if (sum?.requests && this.recent[0] === "–") {
      this.recent = [milliseconds(sum.ns / sum.requests), (sum.rows / (sum.calls || 1)).toFixed(1)];
    }
    this.last = sum;
    const { instances } = model;
    const bytes = instances.reduce((total, instance) => total + (instance.memory ?? 0), 0);
    const texts = [
      stateOf(model),
      sum ? sum.versions.join(", ") : "–",
      sum ? `${sum.requests}${rate}` : "–",
      sum ? `${sum.errors}` : "–",
      ...this.recent,
      instances.length ? `${instances.length} · ${megabytes(bytes)}` : "0",
    ];
    texts.forEach((text, index) => {
      if (this.cells[index].textContent !== text) this.cells[index].textContent = text;
    });
    this.numbers.dataset.state = stateOf(model);
    const shown = notes(model);
    this.notes.hidden = shown.length === 0;
    replace(this.notes.firstChild, shown);
  }
}

function update(event) {
  const before = state.time;
  state = JSON.parse(event.data);
  state.at = performance.now();
  const names = Object.keys(state.models);
  const sums = totals(state.statistics);
  for (const [name, model] of Object.entries(state.models)) {
    if (!rows.has(name)) rows.set(name, new Row(name));
    rows.get(name).update(model, sums.get(name), state.time - before);
  }
  for (const name of [...rows.keys()].filter((known) => !names.includes(known))) rows.delete(name);
  const shown = names.flatMap((name) => [rows.get(name).numbers, rows.get(name).notes]);
  const body = document.querySelector("#models tbody");
  // The rows stay where they are, so that the focus does.
  if (shown.length !== body.children.length || shown.some((row, i) => row !== body.children[i])) {
    body.replaceChildren(...shown);
  }
  const serving = names.filter((name) => !state.models[name].reason).length;
  const problem = state.problem || (state.statistics.error && `statistics: ${state.statistics.error}`);
  report(problem || `${serving} of ${names.length} models serve`, Boolean(problem));
  showState();
}

function report(text, isProblem) {
  const line = document.querySelector("#server");
  if (line.textContent !== text) line.textContent = text;
  line.classList.toggle("problem", isProblem);
}

// Also of a % that is no code, which decodeURIComponent refuses.
const chosen = () =>
  new URLSearchParams(`name=${location.hash.slice(1).replace(/[+&]/g, encodeURIComponent)}`).get("name");

// The part of the details that changes while they are open.
function showState() {
  const name = chosen();
  const model = state.models[name];
  document.querySelector("#model").hidden = !name;
  if (!name) return;
  const text = model ? stateOf(model) : "does not exist";
  replace(document.querySelector("#notes"), [
    element("p", { className: "state", dataset: { state: text } }, `This model ${text}.`),
    ...(model ? notes(model) : []),
  ]);
  const instances = (model?.instances ?? []).map(({ name, pid, state, seconds, memory, shared }) => {
    const texts = [`${pid}`, `${state} for ${seconds.toFixed(0)} s`, megabytes(memory), megabytes(shared)];
    const cells = texts.map((text) => element("td", {}, text));
    return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
  });
  document.querySelector("#instances tbody").replaceChildren(...instances);
  document.querySelector("#manage [name=load]").textContent = model?.reason ? "Load" : "Reload";
  document.querySelector("#manage [name=unload]").disabled = Boolean(model?.reason);
  if (model && !model.reason && loaded !== load(name)) show();
}

const describe = (entry) => `${entry.name}: ${entry.data_type.replace("TYPE_", "")} [${entry.dims.join(", ")}]`;

// The load of a model, by the processes that have ended theirs.
function load(name) {
  const pids = (state.models[name]?.instances ?? []).map(({ pid, state }) => (state === "loading" ? "" : pid));
  return [name, ...pids.filter(Boolean)].join(" ");
}

async function show() {
  const name = chosen();
  loaded = load(name);
  const [title, form, details] = ["#name", "#form", "#details"].map((id) => document.querySelector(id));
  if (title.textContent !== name) {
    title.textContent = name;
    form.hidden = true;
    details.replaceChildren();
    trial = null;
  }
  showState();
  if (!name) return;
  const { config, report, ports } = await fetch(`models/${encodeURIComponent(name)}`, { headers: credentials() })
    .then((response) => response.json())
    .catch((error) => ({ config: { error: error.message }, report: {} }));
  if (chosen() !== name) return;
  const facts = [];
  if (config.error) {
    loaded = ""; // tried again when it serves
    facts.push(["config", config.error]);
  } else {
    const batch = config.max_batch_size ? `at most ${config.max_batch_size} rows` : "none";
    facts.push(...config.input.map((entry) => ["input", describe(entry)]));
    facts.push(...config.output.map((entry) => ["output", describe(entry)]));
    facts.push(["batch", `${batch}${config.dynamic_batching ? ", formed of requests" : ""}`]);
    // A form that is in use stays as it is, unless it is that of another load.
    const facets = JSON.stringify([config.input, config.output, config.max_batch_size, report.request, ports]);
    if (trial?.facets !== facets) trial = new Trial(form, name, config, report.request ?? [], ports, credentials);
    trial.facets = facets;
    form.hidden = false;
  }
  for (const key of ["artifact", "weights", "device", "threads"]) {
    if (report[key] !== undefined) facts.push([key, `${report[key]}`.replace(",", ", ")]);
  }
  for (const [option, value] of Object.entries(report.options ?? {})) {
    facts.push([option, typeof value === "string" ? value : JSON.stringify(value)]);
  }
  const list = facts.flatMap(([key, text]) => [element("dt", {}, key), element("dd", {}, text)]);
  details.replaceChildren(...list);
}

function credentials() {
  const key = document.querySelector("#key").value;
  return key ? { [state.key_header]: key } : {};
}

async function manage(action) {
  const url = `models/${encodeURIComponent(chosen())}/${action}`;
  document.querySelector("#managed").textContent = await fetch(url, { method: "POST", headers: credentials() })
    .then((response) => (response.ok ? `The ${action} has begun.` : response.text()))
    .catch((error) => error.message);
}

function connect() {
  const source = new EventSource("events");
  source.onmessage = update;
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
    if (performance.now() - (state.at ?? 0) > 5000) report("The server does not answer.", true);
  };
}

document.querySelector("#manage").addEventListener("submit", (event) => event.preventDefault());
document.querySelectorAll("#manage button").forEach((button) => (button.onclick = () => manage(button.name)));
document.querySelector("#key").addEventListener("change", show);
addEventListener("hashchange", async () => {
  await show();
  document.querySelector("#name").focus();
});
connect();
show();
