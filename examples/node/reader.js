// Prints what each file's LogprobBatch holds, as one line of JSON, or the rule for which it is refused.
//
//     node reader.js ../../contracts/vectors/v1/valid/*.binpb
'use strict';
const fs = require('node:fs');
const { decode, ContractError, Header, COLUMNS } = require('./contract');

/** Return a value as JSON has it: a 64-bit integer is a string. */
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
