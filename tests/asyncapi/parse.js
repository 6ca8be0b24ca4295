// Reads an AsyncAPI document from standard input, and prints what AsyncAPI's own parser finds in it, as JSON.
import { readFileSync } from "node:fs";
import { Parser } from "@asyncapi/parser";

const { document, diagnostics } = await new Parser().parse(readFileSync(0, "utf8"));
const faults = diagnostics.filter((each) => each.severity < 2).map((each) => `${each.path.join(".")}: ${each.message}`);
const found = document && {
  version: document.version(),
  channels: document.channels().all().map((each) => each.id()),
  operations: document.operations().all().map((each) => `${each.action()} ${each.id()}`),
  messages: document.allMessages().all().length,
};
console.log(JSON.stringify({ faults, ...found }));
