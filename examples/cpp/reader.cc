// Prints what each file's LogprobBatch holds, as one line of JSON, or the rule for which it is refused.
//
//     build/reader ../../contracts/vectors/v1/valid/*.binpb
#include <google/protobuf/util/json_util.h>

#include <fstream>
#include <iostream>
#include <iterator>

#include "contract.h"

namespace util = google::protobuf::util;

namespace {

// Returns a batch's columns, or its header, as JSON: 64-bit integers are strings.
std::string json(const google::protobuf::Message& message) {
  util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  options.always_print_enums_as_ints = true;
  std::string text;
  const auto status = util::MessageToJsonString(message, &text, options);
  if (!status.ok()) throw std::runtime_error(status.ToString());
  return text;
}

std::string read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot open ") + path);
  const std::string data{std::istreambuf_iterator<char>(file), {}};
  try {
    tokenbus::v1::LogprobBatch batch = decode(data);
    const std::string header = json(batch.header());
    batch.clear_header();
    return "{\"header\":" + header + ",\"columns\":" + json(batch) + "}";
  } catch (const ContractError& error) {
    return "{\"field\":\"" + error.field + "\",\"rule\":\"" + error.rule + "\"}";
  }
}

}  // namespace

int main(int count, char** arguments) try {
  for (int i = 1; i < count; ++i) std::cout << read(arguments[i]) << "\n";
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
