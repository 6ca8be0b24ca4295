// Asks a processor for one request's tokens, and prints each as a line: its id and its logprob.
//
//     build/consumer tcp://127.0.0.1:5571 "The old man" 16
//
// It speaks the client protocol of proto/tokenbus/v1/client.proto on one connection. It does not go on after the
// connection or the processor was lost: a client that is to do so says hello again, and resumes its requests.
#include <zmq.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <random>
#include <vector>

#include "contract.h"
#include "tokenbus/v1/client.pb.h"

using namespace tokenbus::v1;

namespace {

constexpr int kLingerMs = 1000, kReceiveTimeoutMs = 100, kWindowFrames = 64, kWindowBytes = 8 << 20;
constexpr int64_t kNsPerMs = 1'000'000;

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

uint64_t drawn() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;  // never zero
}

void say(void* socket, const ClientFrame& frame) {
  const std::string data = frame.SerializeAsString();
  if (zmq_send(socket, data.data(), data.size(), 0) < 0) throw std::runtime_error(zmq_strerror(zmq_errno()));
}

// Returns the parts of the next message; none if it does not come within kReceiveTimeoutMs.
std::vector<std::string> receive(void* socket) {
  std::vector<std::string> parts;
  for (int more = 1; more;) {
    zmq_msg_t part;
    zmq_msg_init(&part);
    if (zmq_msg_recv(&part, socket, 0) < 0) return {};
    parts.emplace_back(static_cast<char*>(zmq_msg_data(&part)), zmq_msg_size(&part));
    more = zmq_msg_more(&part);
    zmq_msg_close(&part);
  }
  return parts;
}

// Prints the request's new tokens, and tells whether it has ended. A row may come again: its position says which of its
// tokens are new.
bool print(const LogprobBatch& batch, uint64_t key, size_t& next) {
  for (const Row& row : rows_of(batch)) {
    if (row.key != key) continue;
    if (row.position > next) throw std::runtime_error("tokens are missing");
    for (; next < row.position + row.tokens.size(); ++next) {
      const Token& token = row.tokens[next - row.position];
      std::printf("%u %.9g\n", token.id, token.logprob);
    }
    if (row.status > ROW_STATUS_FINISHED_LENGTH) throw std::runtime_error(RowStatus_Name(row.status));
    if (row.status >= ROW_STATUS_FINISHED_STOP) return true;
  }
  return false;
}

void run(void* socket, const ClientFrame& hello, const ClientFrame& generate) {
  const uint64_t key = generate.generate().request_key();
  bool is_welcome = false, is_done = false;
  size_t next = 0;
  int64_t interval = 1000 * kNsPerMs, timeout = 10'000 * kNsPerMs;  // until the processor says its own
  int64_t last_sent = now_ns() - interval, last_heard = now_ns();
  ClientFrame heartbeat;
  while (!is_done) {
    const int64_t now = now_ns();
    if (now - last_heard > timeout) throw std::runtime_error("the processor is silent");
    if (now - last_sent >= interval) {
      heartbeat.mutable_heartbeat()->set_sent_at_ns(now);
      say(socket, is_welcome ? heartbeat : hello);
      last_sent = now;
    }
    const std::vector<std::string> parts = receive(socket);
    if (parts.empty()) continue;
    ServerFrame frame;
    if (!frame.ParseFromString(parts[0])) throw std::runtime_error("the processor sent no frame");
    last_heard = now_ns();
    if (frame.has_welcome() && !is_welcome) {
      is_welcome = true;
      interval = frame.welcome().heartbeat_interval_ms() * kNsPerMs;
      timeout = frame.welcome().heartbeat_timeout_ms() * kNsPerMs;
      say(socket, generate);
    }
    if (frame.has_heartbeat()) heartbeat.mutable_heartbeat()->set_echo_ns(frame.heartbeat().sent_at_ns());
    if (frame.has_admitted()) std::cerr << "request " << key << " at " << frame.admitted().worker_id() << "\n";
    if (frame.has_outputs()) is_done = print(decode(parts.at(1)), key, next);  // a draft batch would be parts[2]
    if (frame.has_refusal()) throw std::runtime_error(frame.refusal().message());
    if (frame.has_error()) throw std::runtime_error(frame.error().message());
    if (frame.has_goodbye()) throw std::runtime_error("the processor closes");
    if (frame.number()) {  // an acknowledgement opens the window: no more frames are on the way than it holds
      ClientFrame confirm;
      confirm.mutable_confirm()->set_through_number(frame.number());
      say(socket, confirm);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const char* address = count > 1 ? arguments[1] : "tcp://127.0.0.1:5571";
  ClientFrame hello, generate, goodbye;
  hello.mutable_hello()->set_schema_major(1);
  hello.mutable_hello()->set_schema_minor(1);
  hello.mutable_hello()->set_name("cpp");
  hello.mutable_hello()->set_session(drawn());
  hello.mutable_hello()->set_window_frames(kWindowFrames);
  hello.mutable_hello()->set_window_bytes(kWindowBytes);
  generate.mutable_generate()->set_request_key(drawn());
  generate.mutable_generate()->mutable_text()->set_text(count > 2 ? arguments[2] : "The old man");
  generate.mutable_generate()->mutable_sampling()->set_max_tokens(count > 3 ? std::atoi(arguments[3]) : 16);
  generate.mutable_generate()->set_top_logprobs(0);  // each token's own logprob, and no alternatives
  goodbye.mutable_goodbye()->set_reason(GOODBYE_REASON_STOPPED);

  void* context = zmq_ctx_new();
  void* socket = zmq_socket(context, ZMQ_DEALER);
  zmq_setsockopt(socket, ZMQ_LINGER, &kLingerMs, sizeof kLingerMs);
  zmq_setsockopt(socket, ZMQ_RCVTIMEO, &kReceiveTimeoutMs, sizeof kReceiveTimeoutMs);
  int status = 0;
  try {
    if (zmq_connect(socket, address)) throw std::runtime_error(zmq_strerror(zmq_errno()));
    run(socket, hello, generate);
    say(socket, goodbye);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    status = 1;
  }
  zmq_close(socket);
  zmq_ctx_term(context);
  return status;
}
