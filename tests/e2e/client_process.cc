// A client that does what it is told on standard input, one verb a line, and answers "ok ..." or "error CODE message".
// Tests kill and stop it; it has no logic of its own.
#include <iostream>
#include <optional>
#include <sstream>

#include "proto/errors.h"
#include "tests/e2e/processes.h"

namespace needle::testing {
namespace {

struct Hands {
  std::unique_ptr<client::Client> client;
  std::optional<client::Ticket> ticket;
  std::optional<client::Lease> lease;
  std::optional<client::Ship> ship;
  uint64_t sequence = 0;
};

std::string answer(const absl::Status& status) {
  if (status.ok()) return "ok";
  const std::optional<ErrorCode> code = error_code(status);
  std::string message(status.message());
  for (char& c : message) c = c == '\n' ? ' ' : c;
  return std::string("error ") + (code ? error_row(*code).name : "NONE") + " " + message;
}

template <class Value>
std::string keep(absl::StatusOr<Value> value, std::optional<Value>& place) {
  if (!value.ok()) return answer(value.status());
  place = *std::move(value);
  return "ok";
}

std::string obey(Hands& hands, std::istringstream& words) {
  std::string verb;
  words >> verb;
  CallerThread here;
  if (verb == "attach") {
    std::string socket;
    std::string access;
    words >> socket >> access;
    client::AttachOptions options;
    options.socket = socket;
    options.client_name = "e2e-client";
    options.writable = access != "ro";
    absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::attach(options);
    if (!client.ok()) return answer(client.status());
    hands.client = *std::move(client);
    return "ok";
  }
  if (hands.client == nullptr) return "error NONE attach first";
  if (verb == "reserve") {
    int64_t tokens = 0;
    words >> hands.sequence >> tokens;
    return keep(hands.client->reserve(SequenceId(hands.sequence), tokens), hands.ticket);
  }
  if (verb == "fill") {
    fill_ticket(*hands.client, *hands.ticket, hands.sequence);
    return "ok";
  }
  if (verb == "seal_pages") {
    int64_t tokens = 0;
    words >> tokens;
    return answer(hands.ticket->seal_pages(tokens, {}, here));
  }
  if (verb == "seal") {
    int64_t tokens = 0;
    words >> tokens;
    return answer(hands.ticket->seal(tokens, {}, here));
  }
  if (verb == "forfeit") return answer(hands.ticket->forfeit());
  if (verb == "acquire") {
    words >> hands.sequence;
    return keep(hands.client->acquire(SequenceId(hands.sequence)), hands.lease);
  }
  if (verb == "check") return lease_is(*hands.client, hands.lease->pages(), hands.sequence) ? "ok" : "error NONE wrong bytes";
  if (verb == "recheck") return answer(hands.lease->recheck());
  if (verb == "release") return answer(hands.lease->release());
  if (verb == "ship") {
    std::string peer;
    int64_t deadline_ms = 0;
    words >> peer >> hands.sequence >> deadline_ms;
    return keep(hands.client->ship(peer, SequenceId(hands.sequence), deadline_ms), hands.ship);
  }
  if (verb == "ship_wait") return keep(hands.ship->wait(), hands.lease);
  if (verb == "write_through_read_only_view") {
    const LayerView layer = hands.client->layer(PoolKind::kPaged, 0, 0);
    auto* page = const_cast<std::byte*>(layer.base + layer.page_stride * hands.lease->pages().paged[0].index.value());
    *static_cast<volatile std::byte*>(page) = std::byte{1};
    return "error NONE the write went through";
  }
  return "error NONE unknown verb " + verb;
}

}  // namespace
}  // namespace needle::testing

int main() {
  needle::testing::Hands hands;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::cout << needle::testing::obey(hands, words) << std::endl;
  }
}
