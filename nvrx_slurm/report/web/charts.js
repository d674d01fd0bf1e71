"use strict";
const NAMESPACE = "http://www.w3.org/2000/svg";

/* The data of the page: JSON, gzipped, in base64. */
async function readData() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/* All text goes into the page by textContent: a string of the data is never markup. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, text) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function duration(ms) {
  const s = Math.abs(ms) / 1000;
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 59.95) return `${s.toFixed(s < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(s);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h ${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d ${two(Math.floor((whole % 86400) / 3600))}h`;
}

/* Round distances between ticks of a time axis, in milliseconds. */
const DISTANCES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 3e4, 6e4, 12e4, 3e5, 6e5, 12e5, 18e5, 36e5, 72e5, 216e5,
  432e5, 864e5, 1728e5, 6048e5, 12096e5, 25920e5];

function ticks(from, to, most) {
  const distance = DISTANCES.find((each) => (to - from) / each <= most) ?? to - from;
  const found = [];
  for (let at = Math.ceil(from / distance) * distance; at <= to; at += distance) found.push(at);
  return found;
}

function roundTicks(most, count) {
  const rough = Math.max(most, 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const distance = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough));
  const found = [];
  for (let at = 0; at <= most; at += distance) found.push(at);
  return found;
}
