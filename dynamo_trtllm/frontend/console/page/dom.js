// Creates elements. Text from outside becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}

/** Return an HTML element. An attribute "onclick" is a listener. */
export const make = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

/** Return an SVG element. */
export const makeSvg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = id => document.getElementById(id);

/** Return a table with a row of headings. Cells are texts or nodes. */
export function makeTable(headings, rows, caption) {
  const head = headings.map(text => make("th", { scope: "col" }, text));
  const body = rows.map(({ cells, kind }) =>
    make("tr", { class: kind }, cells.map(cell => make("td", {}, cell))));
  return make("table", {},
    make("caption", { class: "hidden" }, caption),
    make("thead", {}, make("tr", {}, head)), make("tbody", {}, body));
}
