const form = document.querySelector(".filters");
const flows = [...document.querySelectorAll(".flow")];
const told = document.querySelector(".none");

function show() {
  const status = form.elements.status.value;
  const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (flow) =>
    (!status || flow.dataset.status === status) && words.every((word) => flow.dataset.text.includes(word));
  for (const flow of flows) flow.hidden = !fits(flow);
  const shown = flows.filter((flow) => !flow.hidden).length;
  told.textContent = shown ? (shown < flows.length ? `${shown} of ${flows.length} flows` : "") : "No flow fits.";
}

function openNamed() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named instanceof HTMLDetailsElement) {
    named.open = true;
    named.scrollIntoView();
  }
}

form.hidden = false;
form.addEventListener("input", show);
form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  const text = form.elements.text;
  if (event.key === "/" && document.activeElement !== text && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    text.focus();
  } else if (event.key === "Escape" && document.activeElement === text) {
    text.value = "";
    show();
  }
});
addEventListener("hashchange", openNamed);
show();
openNamed();
