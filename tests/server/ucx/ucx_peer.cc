// A daemon's transport in a process of its own, to be killed and stopped by tests. Speaks lines on stdin and stdout:
//
//   at start    address HEX, chunk POOL CHUNK HEX ..., ready
//   meet NODE INCARNATION HEX            learn NODE INCARNATION POOL CHUNK HEX
//   fetch NODE INCARNATION TICKET ATTEMPT PART FIRST COUNT TARGET     answered by: fetched TICKET ATTEMPT PART ok|CODE
//   end of input: stops cleanly, exit 0
//
// usage: ucx_peer NODE INCARNATION TRANSPORTS CALL PAGE_BYTES PAGES_A_CHUNK CHUNKS SEED
#include <poll.h>

#include <cstdio>
#include <iostream>
#include <sstream>

#include "tests/server/ucx/hex.h"
#include "tests/server/ucx/ucx_node.h"

using namespace needle;
using namespace needle::server;
using namespace needle::server::ucx::testing;

int main(int argc, char** argv) {
  if (argc != 9) return 2;
  NodeSettings settings;
  settings.node = static_cast<uint32_t>(std::atoi(argv[1]));
  settings.incarnation = static_cast<uint64_t>(std::atoll(argv[2]));
  settings.transports = argv[3];
  settings.call = argv[4];
  settings.page_bytes = std::atoll(argv[5]);
  settings.pages_a_chunk = std::atoll(argv[6]);
  settings.chunks = std::atoll(argv[7]);
  UcxNode node(settings);
  node.fill(static_cast<uint64_t>(std::atoll(argv[8])));
  std::printf("address %s\n", to_hex(node.transport().address()).c_str());
  for (const ChunkDescriptor& chunk : node.register_chunks()) {
    std::printf("chunk %u %u %s\n", chunk.pool.value(), chunk.chunk.value(), to_hex(chunk.descriptor).c_str());
  }
  std::printf("ready\n");
  std::fflush(stdout);

  // Lines are awaited together with the transport's answers.
  std::string input;
  bool open = true;
  const auto read_lines = [&] {
    pollfd ready{0, POLLIN, 0};
    while (open && ::poll(&ready, 1, 0) == 1) {
      char buffer[4096];
      const ssize_t got = read(0, buffer, sizeof buffer);
      if (got <= 0) {
        open = false;
        return;
      }
      input.append(buffer, static_cast<size_t>(got));
    }
  };
  while (open) {
    node.wait_for(
        [&] {
          read_lines();
          return !open || input.find('\n') != std::string::npos || !node.fetched.empty();
        },
        1'000);
    for (const auto& [id, answers] : node.fetched) {
      for (const FetchCompletion& done : answers) {
        const auto code = error_code(done.status);
        std::printf("fetched %llu %u %u %s\n", static_cast<unsigned long long>(id.ticket.value()), id.attempt, id.part,
                    code.has_value() ? error_row(*code).name : "ok");
      }
    }
    std::fflush(stdout);
    node.fetched.clear();
    for (size_t end = input.find('\n'); end != std::string::npos; end = input.find('\n')) {
      std::istringstream line(input.substr(0, end));
      input.erase(0, end + 1);
      std::string verb;
      uint32_t peer = 0;
      uint64_t incarnation = 0;
      line >> verb >> peer >> incarnation;
      if (verb == "meet") {
        std::string hex;
        line >> hex;
        NEEDLE_CHECK(node.transport().meet_peer(NodeId(peer), Incarnation(incarnation), from_hex(hex)).ok(), "no address");
      } else if (verb == "learn") {
        uint32_t pool = 0;
        uint32_t chunk = 0;
        std::string hex;
        line >> pool >> chunk >> hex;
        node.transport().learn_peer(NodeId(peer), Incarnation(incarnation), {{PoolId(pool), ChunkIndex(chunk), from_hex(hex)}});
      } else if (verb == "fetch") {
        uint64_t ticket = 0;
        uint32_t attempt = 0;
        uint32_t part = 0;
        int64_t first = 0;
        int64_t count = 0;
        int64_t target = 0;
        line >> ticket >> attempt >> part >> first >> count >> target;
        node.transport().post(
            node.request({TicketId(ticket), attempt, part}, NodeId(peer), Incarnation(incarnation), first, count, target));
      }
    }
  }
  return 0;
}
