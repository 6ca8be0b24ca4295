// Reads a LogprobBatch, and refuses one that breaks a rule of docs/contract.md, under the default limits.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tokenbus/v1/logprob_batch.pb.h"

// A message breaks a rule; `rule` is one of the names in docs/contract.md.
struct ContractError : std::runtime_error {
  ContractError(std::string where, std::string broken);
  std::string field;
  std::string rule;
};

// Returns the batch in some bytes; throws the ContractError of a rule that it breaks.
tokenbus::v1::LogprobBatch decode(const std::string& data);

// A token; one of a row that is not scored has no logprob, and its rank is 0.
struct Token {
  uint32_t id;
  float logprob;
  uint32_t rank;
};

// One request's tokens in a batch.
struct Row {
  uint64_t key;
  uint32_t position;
  tokenbus::v1::RowStatus status;
  std::vector<Token> tokens;
};

// Returns the rows of a batch that was decoded.
std::vector<Row> rows_of(const tokenbus::v1::LogprobBatch& batch);
