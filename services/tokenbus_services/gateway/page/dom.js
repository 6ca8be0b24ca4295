// Elements in a line: texts are always set as text, never parsed.

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

/** Call a drawing function at most once a frame, and once in so many milliseconds, however often it is asked for. */
export function eachFrame(draw, pause = 0) {
  let isDue = false;
  let drawnAt = -Infinity;
  const now = () => {
    isDue = false;
    drawnAt = performance.now();
    draw();
  };
  return () => {
    if (isDue) return;
    isDue = true;
    const wait = drawnAt + pause - performance.now();
    if (wait > 0) setTimeout(requestAnimationFrame, wait, now);
    else requestAnimationFrame(now);
  };
}
