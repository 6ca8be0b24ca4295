// Reads a LogprobBatch, or refuses a batch that breaks a rule of docs/contract.md or exceeds a default limit.
'use strict';
const protobuf = require('protobufjs');
const { message, values, boundsOf, messageBoundsOf, statusRules } = require('./schema');

const Batch = message('LogprobBatch');
const Header = message('BatchHeader');
const COLUMNS = Batch.fieldsArray.filter((field) => boundsOf(field).length);
const STATUS_RULES = statusRules();
const STATUS = values('RowStatus');
const SCORING = values('Scoring');
const KIND = values('BatchKind');
const VALUES = values('ValueKind');
const LOGITS = [VALUES.VALUE_KIND_RAW_LOGITS, VALUES.VALUE_KIND_PROCESSED_LOGITS];
const MAJOR = 1;
const MOST_VARINT_BYTES = 10;

class ContractError extends Error {
  constructor(field, rule, limit, actual) {
    super(`${field}: ${rule}: ${limit}, got ${actual}`);
    Object.assign(this, { field, rule });
  }
}

function demand(holds, field, rule, limit, actual) {
  if (!holds) throw new ContractError(field, rule, limit, actual);
}

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

/** Decode a batch from bytes. Throws a ContractError if the batch breaks a rule. */
function decode(data) {
  const most = messageBoundsOf(Batch).default_max_bytes;
  demand(data.length <= most, 'message', 'bytes', most, data.length);
  const batch = parse(data);
  demand(batch.header, 'header', 'required', 'a header', 'none');
  checkHeader(batch.header);
  for (const column of COLUMNS) checkValues(column, batch[column.name], batch.header);
  checkRows(batch);
  checkLengths(batch);
  checkAlternatives(batch);
  checkMasks(batch);
  return batch;
}

function parse(data) {
  const reader = protobuf.Reader.create(data);
  reader.discardUnknown = false;
  let batch;
  try {
    batch = Batch.decode(reader);
  } catch (error) {
    throw new ContractError('message', 'malformed', 'a protobuf message', error.message);
  }
  // protobufjs skips a varint of any length in an unknown field, but protobuf's own parsers refuse eleven bytes.
  for (const field of [...(batch.$unknowns ?? []), ...(batch.header?.$unknowns ?? [])]) {
    const key = field.findIndex((byte) => byte < 128) + 1;
    const long = (field[0] & 7) === 0 && field.length - key > MOST_VARINT_BYTES;
    demand(!long, 'message', 'malformed', `a varint of ${MOST_VARINT_BYTES} bytes`, field.length - key);
  }
  return batch;
}

function checkHeader(header) {
  demand(header.schema_major === MAJOR, 'header.schema_major', 'version', MAJOR, header.schema_major);
  for (const field of Header.fieldsArray) {
    const name = `header.${field.name}`;
    const value = header[field.name];
    if (field.type === 'string') {
      const { min_bytes: least = 0, max_bytes: most } = boundsOf(field);
      const length = Buffer.byteLength(value);
      demand(length >= least, name, 'required', `${least} bytes`, length);
      demand(length <= most, name, 'bytes', most, length);
    } else if (field.type !== 'bool') {
      checkValue(field, boundsOf(field), name, Number(value)); // `Number` is exact here, because no bound exceeds 2**53
    }
  }
  const isTarget = header.kind === KIND.BATCH_KIND_TARGET;
  demand(isTarget || !header.draft_follows, 'header.draft_follows', 'kind', 'false in a draft batch', true);
  demand(header.part_index < header.part_count, 'header.part_index', 'max', header.part_count - 1, header.part_index);
}

/** Check a number against its field's bounds and against the maximum `most`. */
function checkValue(field, bounds, name, value, most = Infinity) {
  const max = Math.min(bounds.default_max ?? bounds.max ?? Infinity, most);
  if (bounds.finite) demand(Number.isFinite(value), name, 'finite', 'a finite number', value);
  if (bounds.min !== undefined) demand(value >= bounds.min, name, 'min', bounds.min, value);
  if (bounds.named) demand(value in field.resolvedType.valuesById, name, 'named', 'a named value', value);
  demand(value <= max, name, 'max', max, value);
}

function checkValues(column, elements, header) {
  const { name } = column;
  const bounds = boundsOf(column);
  const mostItems = bounds.default_max_items ?? bounds.max_items;
  demand(elements.length <= mostItems, name, 'items', mostItems, elements.length);
  const most = mostOf(name, header);
  elements.forEach((value, place) => checkValue(column, bounds, `${name}[${place}]`, Number(value), most));
  if (bounds.unique) {
    const texts = elements.map(String); // protobufjs returns 64-bit integers as objects
    const repeated = texts.findIndex((each, place) => texts.indexOf(each) !== place);
    demand(repeated < 0, `${name}[${repeated}]`, 'unique', 'each value once', texts[repeated]);
  }
}

/** Return the largest value that the batch's header allows in a column. */
function mostOf(name, header) {
  const vocabulary = header.vocabulary_size || Infinity;
  if (name.endsWith('token_ids')) return vocabulary - 1;
  if (name === 'ranks' || name === 'top_ks' || name === 'mask_sizes') return vocabulary;
  if (name.endsWith('logprobs') && !LOGITS.includes(header.value_kind)) return 0;
  return Infinity;
}

function checkRows(batch) {
  const { header } = batch;
  const rows = batch.request_ids.length;
  for (const column of COLUMNS.filter((each) => boundsOf(each).length === 'COLUMN_LENGTH_ROWS')) {
    demand(batch[column.name].length === rows, column.name, 'length', rows, batch[column.name].length);
  }
  if (header.part_count === 1 && !header.selection) {
    demand(header.step_rows === rows, 'header.step_rows', 'length', rows, header.step_rows);
  }
  demand(header.step_rows >= rows, 'header.step_rows', 'min', rows, header.step_rows);
  const isDraft = header.kind === KIND.BATCH_KIND_DRAFT;
  for (let row = 0; row < rows; row += 1) {
    const rule = STATUS_RULES.get(batch.statuses[row]);
    const tokens = batch.token_counts[row];
    const proposals = batch.proposal_counts[row];
    const drafts = batch.draft_token_counts[row];
    const scoring = batch.scorings[row];
    const index = batch.batch_indices[row];
    demand(index < header.step_rows, `batch_indices[${row}]`, 'max', header.step_rows - 1, index);
    demand(tokens > 0 || rule.tokens !== 'TOKEN_RULE_SOME', `token_counts[${row}]`, 'status', 'at least 1', tokens);
    demand(tokens === 0 || rule.tokens !== 'TOKEN_RULE_NONE', `token_counts[${row}]`, 'status', 0, tokens);
    demand(proposals === 0 || rule.proposals, `proposal_counts[${row}]`, 'status', 0, proposals);
    demand(drafts === 0 || !isDraft, `draft_token_counts[${row}]`, 'kind', 0, drafts);
    demand(proposals === 0 || !isDraft, `proposal_counts[${row}]`, 'kind', 0, proposals);
    const hasKind = header.value_kind !== VALUES.VALUE_KIND_UNSPECIFIED || scoring === SCORING.SCORING_NONE;
    demand(hasKind, 'header.value_kind', 'scoring', 'a kind, because rows are scored', header.value_kind);
    const mayHave = scoring === SCORING.SCORING_FULL || batch.top_ks[row] === 0;
    demand(mayHave, `top_ks[${row}]`, 'scoring', 0, batch.top_ks[row]);
    const { extras, given, bound } = askedBy(batch, row);
    demand(extras === 0 || isScored(batch, row), `extras[${row}]`, 'scoring', 0, extras);
    demand(given === 0 || scoring === SCORING.SCORING_FULL, `given_counts[${row}]`, 'scoring', 0, given);
    demand(bound === 0 || scoring === SCORING.SCORING_FULL, `mask_bounds[${row}]`, 'scoring', 0, bound);
  }
}

/** Return the extra scores that a row asked for: none if the batch lacks their columns. */
const askedBy = (batch, row) => ({
  extras: batch.extras[row] ?? 0,
  given: batch.given_counts[row] ?? 0,
  bound: batch.mask_bounds[row] ?? 0,
});

/** Return the number of ids in the batch for each mask: zero for a mask larger than its row's bound. */
function toldMasks(batch) {
  const bounds = batch.token_counts.flatMap((count, row) => Array(count).fill(askedBy(batch, row).bound));
  const asked = bounds.filter((bound) => bound > 0);
  return batch.mask_sizes.map((size, place) => (size <= (asked[place] ?? 0) ? size : 0));
}

/** Check that the ids of each mask ascend. */
function checkMasks(batch) {
  const ids = batch.mask_token_ids;
  let start = 0;
  for (const size of toldMasks(batch)) {
    for (let at = start + 1; at < start + size; at += 1) {
      demand(ids[at] > ids[at - 1], `mask_token_ids[${at}]`, 'order', `above ${ids[at - 1]}`, ids[at]);
    }
    start += size;
  }
}

/** Check that each column has the length that follows from the rows' counts. */
function checkLengths(batch) {
  const counts = batch.token_counts;
  const tokensOf = (has) => sum(counts.filter((_, row) => has(askedBy(batch, row))));
  const stopped = batch.statuses.filter((each) => each === STATUS.ROW_STATUS_FINISHED_STOP).length;
  const wanted = {
    COLUMN_LENGTH_ROWS: batch.request_ids.length,
    COLUMN_LENGTH_TOKENS: sum(counts),
    COLUMN_LENGTH_SCORED_TOKENS: sum(counts.filter((_, row) => isScored(batch, row))),
    COLUMN_LENGTH_ALTERNATIVES: sum(counts.map((count, row) => count * batch.top_ks[row])),
    COLUMN_LENGTH_PROPOSALS: sum(batch.proposal_counts),
    COLUMN_LENGTH_STOPPED_ROWS: batch.stops.length ? stopped : 0,
    COLUMN_LENGTH_ROWS_OR_NONE: batch.request_ids.length,
    COLUMN_LENGTH_OTHER_LOGPROBS: tokensOf(({ extras }) => extras & 1),
    COLUMN_LENGTH_ENTROPIES: tokensOf(({ extras }) => extras & 2),
    COLUMN_LENGTH_GIVEN_TOKENS: sum(batch.given_counts),
    COLUMN_LENGTH_GIVEN_LOGPROBS: sum(counts.map((count, row) => count * askedBy(batch, row).given)),
    COLUMN_LENGTH_MASKED_TOKENS: tokensOf(({ bound }) => bound > 0),
    COLUMN_LENGTH_MASK_TOKENS: sum(toldMasks(batch)),
  };
  for (const column of COLUMNS) {
    const elements = wanted[boundsOf(column).length];
    if (boundsOf(column).length === 'COLUMN_LENGTH_ROWS_OR_NONE' && !batch[column.name].length) continue;
    demand(batch[column.name].length === elements, column.name, 'length', elements, batch[column.name].length);
  }
}

const isScored = (batch, row) => batch.scorings[row] !== SCORING.SCORING_NONE;

/** Check the order of each token's alternatives, and that the token's rank and logprob agree with them. */
function checkAlternatives(batch) {
  const ids = batch.alternative_token_ids;
  const logprobs = batch.alternative_logprobs;
  let start = 0;
  for (const row of rows(batch)) {
    for (const { id, logprob, rank, scored } of row.topK ? row.tokens : []) {
      const end = start + row.topK;
      for (let at = start + 1; at < end; at += 1) {
        const isTie = logprobs[at] === logprobs[at - 1];
        demand(logprobs[at] <= logprobs[at - 1], `alternative_logprobs[${at}]`, 'order', logprobs[at - 1], logprobs[at]);
        demand(!isTie || ids[at] > ids[at - 1], `alternative_token_ids[${at}]`, 'order', 'a higher id', ids[at]);
      }
      const there = logprobs[start + Math.min(rank, row.topK) - 1];
      const fits = there === logprob || (rank > row.topK && there > logprob);
      demand(fits, `ranks[${scored}]`, 'agreement', 'a rank that fits', rank);
      for (let at = start; at < end; at += 1) {
        const agrees = ids[at] !== id || logprobs[at] === logprob;
        demand(agrees, `alternative_logprobs[${at}]`, 'agreement', logprob, logprobs[at]);
      }
      start = end;
    }
  }
}

/** Yield each row with its tokens; `scored` is a token's index in the columns of scored tokens. */
function* rows(batch) {
  let [token, scored] = [0, 0];
  for (let row = 0; row < batch.request_ids.length; row += 1) {
    const tokens = [];
    for (let place = 0; place < batch.token_counts[row]; place += 1) {
      const values = isScored(batch, row) ? { logprob: batch.logprobs[scored], rank: batch.ranks[scored], scored } : {};
      tokens.push({ id: batch.token_ids[token], ...values });
      token += 1;
      scored += isScored(batch, row) ? 1 : 0;
    }
    const [key, position, status] = [batch.request_ids[row].toString(), batch.positions[row], batch.statuses[row]];
    yield { key, position, status, topK: batch.top_ks[row], tokens };
  }
}

module.exports = { decode, rows, ContractError, Header, COLUMNS };
