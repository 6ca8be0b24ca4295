#include "contract.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>

#include "tokenbus/v1/bounds.pb.h"

using namespace tokenbus::v1;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

ContractError::ContractError(std::string where, std::string broken)
    : std::runtime_error(where + ": " + broken), field(where), rule(broken) {}

namespace {

constexpr uint32_t kMajor = 1;
constexpr double kUnbounded = std::numeric_limits<double>::infinity();

void demand(bool holds, const std::string& field, const char* rule) {
  if (!holds) throw ContractError(field, rule);
}

std::string at(const std::string& column, int place) { return column + "[" + std::to_string(place) + "]"; }

const FieldBounds& bounds_of(const FieldDescriptor* field) { return field->options().GetExtension(bounds); }

const StatusRule& rule_of(int status) {
  return RowStatus_descriptor()->FindValueByNumber(status)->options().GetExtension(status_rule);
}

// Returns a number of a field, or of its element at a place; a bound is below 2**53, so a double is exact enough.
double number_at(const Message& message, const FieldDescriptor* field, int place) {
  const auto* reflection = message.GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return repeated ? reflection->GetRepeatedUInt32(message, field, place) : reflection->GetUInt32(message, field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return repeated ? reflection->GetRepeatedUInt64(message, field, place) : reflection->GetUInt64(message, field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return repeated ? reflection->GetRepeatedEnumValue(message, field, place)
                      : reflection->GetEnumValue(message, field);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return repeated ? reflection->GetRepeatedFloat(message, field, place) : reflection->GetFloat(message, field);
    default:
      return 0;  // the header's texts and flags have checks of their own
  }
}

// Checks a number by its field's bounds; `most` may be tighter than they are.
void check_value(const FieldDescriptor* field, const std::string& name, double value, double most = kUnbounded) {
  const FieldBounds& bound = bounds_of(field);
  if (bound.has_default_max()) {
    most = std::min<double>(most, bound.default_max());
  } else if (bound.has_max()) {
    most = std::min<double>(most, bound.max());
  }
  demand(!bound.finite() || std::isfinite(value), name, "finite");
  demand(!bound.has_min() || value >= bound.min(), name, "min");
  demand(!bound.named() || field->enum_type()->FindValueByNumber(static_cast<int>(value)), name, "named");
  demand(value <= most, name, "max");
}

void check_header(const BatchHeader& header) {
  demand(header.schema_major() == kMajor, "header.schema_major", "version");
  for (int i = 0; i < BatchHeader::descriptor()->field_count(); ++i) {
    const FieldDescriptor* field = BatchHeader::descriptor()->field(i);
    check_value(field, "header." + field->name(), number_at(header, field, 0));
  }
  const FieldBounds& id = bounds_of(BatchHeader::descriptor()->FindFieldByName("worker_id"));
  demand(header.worker_id().size() >= id.min_bytes(), "header.worker_id", "required");
  demand(header.worker_id().size() <= id.max_bytes(), "header.worker_id", "bytes");
  demand(header.kind() == BATCH_KIND_TARGET || !header.draft_follows(), "header.draft_follows", "kind");
  demand(header.part_index() < header.part_count(), "header.part_index", "max");
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Returns the largest value of a column that follows from the batch's header.
double most_of(const std::string& column, const BatchHeader& header) {
  const double vocabulary = header.vocabulary_size() ? header.vocabulary_size() : kUnbounded;
  const bool logits = header.value_kind() == VALUE_KIND_RAW_LOGITS || header.value_kind() == VALUE_KIND_PROCESSED_LOGITS;
  if (ends_with(column, "token_ids")) return vocabulary - 1;
  if (column == "ranks" || column == "top_ks" || column == "mask_sizes") return vocabulary;
  if (ends_with(column, "logprobs")) return logits ? kUnbounded : 0;
  return kUnbounded;
}

void check_column(const LogprobBatch& batch, const FieldDescriptor* column) {
  const FieldBounds& bound = bounds_of(column);
  const auto* reflection = batch.GetReflection();
  const int size = reflection->FieldSize(batch, column);
  const uint32_t most_items = bound.default_max_items() ? bound.default_max_items() : bound.max_items();
  demand(static_cast<uint32_t>(size) <= most_items, column->name(), "items");
  const double most = most_of(column->name(), batch.header());
  std::set<uint64_t> seen;
  for (int i = 0; i < size; ++i) {
    const std::string name = at(column->name(), i);
    check_value(column, name, number_at(batch, column, i), most);
    if (bound.unique()) {
      const bool wide = column->cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
      const uint64_t value = wide ? reflection->GetRepeatedUInt64(batch, column, i)
                                  : reflection->GetRepeatedUInt32(batch, column, i);
      demand(seen.insert(value).second, name, "unique");
    }
  }
}

// What a row asked for beyond its logprobs: nothing where the columns are not there.
struct Asked {
  uint32_t extras, given, bound;
};

Asked asked_by(const LogprobBatch& batch, int row) {
  return {row < batch.extras_size() ? batch.extras(row) : 0, row < batch.given_counts_size() ? batch.given_counts(row) : 0,
          row < batch.mask_bounds_size() ? batch.mask_bounds(row) : 0};
}

// Returns how many ids are told of each mask: none of one that is larger than its row's bound.
std::vector<uint32_t> told_masks(const LogprobBatch& batch) {
  std::vector<uint32_t> told;
  for (int row = 0; row < batch.request_keys_size(); ++row) {
    const uint32_t bound = asked_by(batch, row).bound;
    for (uint32_t count = bound ? batch.token_counts(row) : 0; count > 0; --count) {
      const int place = static_cast<int>(told.size());
      const uint32_t size = place < batch.mask_sizes_size() ? batch.mask_sizes(place) : 0;
      told.push_back(size <= bound ? size : 0);
    }
  }
  return told;
}

// Checks that the ids of each mask rise.
void check_masks(const LogprobBatch& batch) {
  int start = 0;
  for (const uint32_t size : told_masks(batch)) {
    const int end = start + static_cast<int>(size);
    for (int i = start + 1; i < end; ++i) {
      demand(batch.mask_token_ids(i) > batch.mask_token_ids(i - 1), at("mask_token_ids", i), "order");
    }
    start = end;
  }
}

void check_rows(const LogprobBatch& batch) {
  const BatchHeader& header = batch.header();
  const uint32_t rows = batch.request_keys_size();
  if (header.part_count() == 1 && !header.selection()) demand(header.step_rows() == rows, "header.step_rows", "length");
  demand(header.step_rows() >= rows, "header.step_rows", "min");
  const bool draft = header.kind() == BATCH_KIND_DRAFT;
  for (uint32_t row = 0; row < rows; ++row) {
    const StatusRule& rule = rule_of(batch.statuses(row));
    const uint32_t tokens = batch.token_counts(row);
    const uint32_t proposals = batch.proposal_counts(row);
    const Scoring scoring = batch.scorings(row);
    demand(batch.batch_indices(row) < header.step_rows(), at("batch_indices", row), "max");
    demand(tokens > 0 || rule.tokens() != TOKEN_RULE_SOME, at("token_counts", row), "status");
    demand(tokens == 0 || rule.tokens() != TOKEN_RULE_NONE, at("token_counts", row), "status");
    demand(proposals == 0 || rule.proposals(), at("proposal_counts", row), "status");
    demand(proposals == 0 || !draft, at("proposal_counts", row), "kind");
    demand(batch.draft_token_counts(row) == 0 || !draft, at("draft_token_counts", row), "kind");
    demand(scoring == SCORING_NONE || header.value_kind() != VALUE_KIND_UNSPECIFIED, "header.value_kind", "scoring");
    demand(scoring == SCORING_FULL || batch.top_ks(row) == 0, at("top_ks", row), "scoring");
    const Asked asked = asked_by(batch, row);
    demand(scoring != SCORING_NONE || asked.extras == 0, at("extras", row), "scoring");
    demand(scoring == SCORING_FULL || asked.given == 0, at("given_counts", row), "scoring");
    demand(scoring == SCORING_FULL || asked.bound == 0, at("mask_bounds", row), "scoring");
  }
}

// Checks that each column of some kind of length has so many elements.
void check_lengths(const LogprobBatch& batch, ColumnLength length, uint32_t wanted) {
  for (int i = 0; i < LogprobBatch::descriptor()->field_count(); ++i) {
    const FieldDescriptor* column = LogprobBatch::descriptor()->field(i);
    if (bounds_of(column).length() != length) continue;
    const uint32_t size = batch.GetReflection()->FieldSize(batch, column);
    if (length == COLUMN_LENGTH_ROWS_OR_NONE && size == 0) continue;
    demand(size == wanted, column->name(), "length");
  }
}

// Checks that each column is as long as the rows' counts say.
void check_counted(const LogprobBatch& batch) {
  uint32_t tokens = 0, scored = 0, alternatives = 0, proposals = 0, stopped = 0, told = 0;
  uint32_t other = 0, entropies = 0, given = 0, given_values = 0, masked = 0;
  for (int row = 0; row < batch.request_keys_size(); ++row) {
    tokens += batch.token_counts(row);
    scored += batch.scorings(row) == SCORING_NONE ? 0 : batch.token_counts(row);
    alternatives += batch.token_counts(row) * batch.top_ks(row);
    proposals += batch.proposal_counts(row);
    stopped += batch.statuses(row) == ROW_STATUS_FINISHED_STOP;
    const Asked asked = asked_by(batch, row);
    other += asked.extras & 1 ? batch.token_counts(row) : 0;
    entropies += asked.extras & 2 ? batch.token_counts(row) : 0;
    given += asked.given;
    given_values += batch.token_counts(row) * asked.given;
    masked += asked.bound ? batch.token_counts(row) : 0;
  }
  for (const uint32_t size : told_masks(batch)) told += size;
  check_lengths(batch, COLUMN_LENGTH_TOKENS, tokens);
  check_lengths(batch, COLUMN_LENGTH_SCORED_TOKENS, scored);
  check_lengths(batch, COLUMN_LENGTH_ALTERNATIVES, alternatives);
  check_lengths(batch, COLUMN_LENGTH_PROPOSALS, proposals);
  check_lengths(batch, COLUMN_LENGTH_STOPPED_ROWS, batch.stops_size() ? stopped : 0);
  check_lengths(batch, COLUMN_LENGTH_ROWS_OR_NONE, batch.request_keys_size());
  check_lengths(batch, COLUMN_LENGTH_OTHER_LOGPROBS, other);
  check_lengths(batch, COLUMN_LENGTH_ENTROPIES, entropies);
  check_lengths(batch, COLUMN_LENGTH_GIVEN_TOKENS, given);
  check_lengths(batch, COLUMN_LENGTH_GIVEN_LOGPROBS, given_values);
  check_lengths(batch, COLUMN_LENGTH_MASKED_TOKENS, masked);
  check_lengths(batch, COLUMN_LENGTH_MASK_TOKENS, told);
}

// Checks one token's alternatives, from `start`: their order, and that its rank and its value agree with them.
void check_token(const LogprobBatch& batch, int token, int scored, int start, int top_k) {
  const auto& ids = batch.alternative_token_ids();
  const auto& values = batch.alternative_logprobs();
  const int end = start + top_k;
  for (int i = start + 1; i < end; ++i) {
    demand(values[i] <= values[i - 1], at("alternative_logprobs", i), "order");
    demand(values[i] < values[i - 1] || ids[i] > ids[i - 1], at("alternative_token_ids", i), "order");
  }
  const float own = batch.logprobs(scored);
  const uint32_t rank = batch.ranks(scored), last = top_k;
  const float there = values[start + std::min(rank, last) - 1];
  demand(there == own || (rank > last && there > own), at("ranks", scored), "agreement");
  for (int i = start; i < end; ++i) {
    demand(ids[i] != batch.token_ids(token) || values[i] == own, at("alternative_logprobs", i), "agreement");
  }
}

void check_alternatives(const LogprobBatch& batch) {
  int token = 0, scored = 0, start = 0;
  for (int row = 0; row < batch.request_keys_size(); ++row) {
    const int top_k = batch.top_ks(row);
    for (uint32_t count = batch.token_counts(row); count > 0; --count) {
      if (top_k) check_token(batch, token, scored, start, top_k);
      ++token;
      scored += batch.scorings(row) != SCORING_NONE;
      start += top_k;
    }
  }
}

}  // namespace

LogprobBatch decode(const std::string& data) {
  const auto& limits = LogprobBatch::descriptor()->options().GetExtension(message_bounds);
  demand(data.size() <= limits.default_max_bytes(), "message", "bytes");
  LogprobBatch batch;
  demand(batch.ParseFromString(data), "message", "malformed");
  demand(batch.has_header(), "header", "required");
  check_header(batch.header());
  for (int i = 0; i < LogprobBatch::descriptor()->field_count(); ++i) {
    const FieldDescriptor* field = LogprobBatch::descriptor()->field(i);
    if (bounds_of(field).length()) check_column(batch, field);
  }
  check_lengths(batch, COLUMN_LENGTH_ROWS, batch.request_keys_size());
  check_rows(batch);
  check_counted(batch);
  check_alternatives(batch);
  check_masks(batch);
  return batch;
}

std::vector<Row> rows_of(const LogprobBatch& batch) {
  std::vector<Row> rows;
  int token = 0, scored = 0;
  for (int row = 0; row < batch.request_keys_size(); ++row) {
    rows.push_back({batch.request_keys(row), batch.positions(row), batch.statuses(row), {}});
    for (uint32_t count = batch.token_counts(row); count > 0; --count) {
      const bool is_scored = batch.scorings(row) != SCORING_NONE;
      const float logprob = is_scored ? batch.logprobs(scored) : std::nanf("");
      rows.back().tokens.push_back({batch.token_ids(token), logprob, is_scored ? batch.ranks(scored) : 0});
      ++token;
      scored += is_scored;
    }
  }
  return rows;
}
