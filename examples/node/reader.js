// Prints each file's LogprobBatch as one line of JSON, or the rule that the batch breaks.
//
//     node reader.js ../../contracts/vectors/v1/valid/*.binpb
'use strict';
const fs = require('node:fs');
const { decode, ContractError, Header, COLUMNS } = require('./contract');

/** Convert a value for JSON: a 64-bit integer becomes a string. */
const plain = (value) => (typeof value === 'object' ? value.toString() : value);

function read(file) {
  try {
    const batch = decode(fs.readFileSync(file));
    const header = Header.fieldsArray.map(({ name }) => [name, plain(batch.header[name])]);
    const columns = COLUMNS.map(({ name }) => [name, batch[name].map(plain)]);
    return { header: Object.fromEntries(header), columns: Object.fromEntries(columns) };
  } catch (error) {
    if (!(error instanceof ContractError)) throw error;
    return { field: error.field, rule: error.rule, message: error.message };
  }
}

for (const file of process.argv.slice(2)) fs.writeSync(1, `${JSON.stringify(read(file))}\n`);
