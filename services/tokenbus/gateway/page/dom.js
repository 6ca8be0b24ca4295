// Creates elements; texts are always set as text, never parsed.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Terms and their descriptions, for a definition list; pairs without a description are left out. */
export function described(pairs) {
  return pairs
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([term, value, kind]) => element("div", { class: kind }, element("dt", {}, term), element("dd", {}, value)));
}

/**
 * Call a drawing function at most once a frame, and once in so many milliseconds, however often it is asked for.
 *
 * One that takes long, as for a text of very many tokens, gets a quarter of the time, so that the page can be used.
 */
export function eachFrame(draw, pause = 0) {
  let isDue = false;
  let nextAt = -Infinity;
  const now = () => {
    isDue = false;
    const began = performance.now();
    draw();
    nextAt = began + Math.max(pause, 4 * (performance.now() - began));
  };
  return () => {
    if (isDue) return;
    isDue = true;
    const wait = nextAt - performance.now();
    if (wait > 0) setTimeout(requestAnimationFrame, wait, now);
    else requestAnimationFrame(now);
  };
}
