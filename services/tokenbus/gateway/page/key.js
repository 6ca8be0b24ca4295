// The API key of this tab, which is sent in a header and never in a URL.

const NAME = "tokenbus-api-key";

/** Return the headers that identify the client, if a key was entered. */
export function keyHeaders() {
  const key = sessionStorage.getItem(NAME);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Keep the box's key until the tab is closed; an empty box forgets it. */
export function keepKey(box) {
  box.value = sessionStorage.getItem(NAME) ?? "";
  box.addEventListener("input", () => {
    const key = box.value.trim();
    // Headers allow only these characters, and keys contain no others.
    if (/^[\x21-\x7e]+$/.test(key)) sessionStorage.setItem(NAME, key);
    else sessionStorage.removeItem(NAME);
  });
}
