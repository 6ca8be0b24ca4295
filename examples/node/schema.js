// Reads messages, enums and the bounds of fields from the .proto files.
'use strict';
const path = require('node:path');
const protobuf = require('protobufjs');

const PROTO = path.join(__dirname, '..', '..', 'proto');
const GOOGLE = path.dirname(require.resolve('protobufjs/package.json'));

const root = new protobuf.Root();
root.resolvePath = (origin, target) => path.join(target.startsWith('google/') ? GOOGLE : PROTO, target);
root.loadSync(['tokenbus/v1/logprob_batch.proto', 'tokenbus/v1/client.proto'], { keepCase: true });
root.resolveAll();

/** Return an option of a field or a message, such as `(bounds)`, as an object, which is empty without the option. */
const option = (declared, name) => Object.assign({}, ...(declared.parsedOptions ?? []).map((each) => each[name]));

module.exports = {
  message: (name) => root.lookupType(`tokenbus.v1.${name}`),
  values: (name) => root.lookupEnum(`tokenbus.v1.${name}`).values,
  boundsOf: (field) => option(field, '(bounds)'),
  messageBoundsOf: (message) => option(message, '(message_bounds)'),
  /** Return a map from the number of each row status to the tokens and proposals that such rows may have. */
  statusRules: () => {
    const { values, valuesOptions } = root.lookupEnum('tokenbus.v1.RowStatus');
    const ruled = Object.entries(values).filter(([name]) => valuesOptions[name]);
    return new Map(ruled.map(([name, number]) => {
      const options = valuesOptions[name];
      return [number, { tokens: options['(status_rule).tokens'], proposals: options['(status_rule).proposals'] === true }];
    }));
  },
};
