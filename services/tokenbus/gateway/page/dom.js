// Creates elements without parsing texts as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Return the terms and descriptions of a definition list; pairs without a description are left out. */
export function described(pairs) {
  return pairs
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([term, value, kind]) => element("div", { class: kind }, element("dt", {}, term), element("dd", {}, value)));
}

/**
 * Return a function that calls `draw` in the next frame, at most once a frame and once in `pause` milliseconds.
 *
 * A slow `draw`, as for a very long text, gets a quarter of the time, so that the page stays usable.
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
