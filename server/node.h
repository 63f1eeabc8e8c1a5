// One daemon: its parts, the order in which they start, and its reverse.
//
//   descriptors kept over a restart -> metadata -> memory -> transport -> core -> peers -> attach -> loop -> service -> metrics
//
// What must stay true:
//  1. start() either gives a daemon whose pools are whole, or an error that says what to change; nothing is left behind.
//  2. stop() runs the parts down in reverse: nobody new, then those under way up to their deadline, then threads, then memory.
//  3. Parts speak to the loop through one door, which holds messages back until the loop exists and refuses them once it
//     has stopped.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/log.h"
#include "server/daemon_options.h"
#include "server/memory/descriptor_store.h"
#include "server/node_plan.h"

namespace needle::server {

std::string build_text();  // what this was built with; --version, Welcome, Hello, needle_build_info

class Node {
 public:
  // `store` holds the memory's descriptors; it and the log outlive the node.
  static absl::StatusOr<std::unique_ptr<Node>> start(const ParsedOptions& parsed, const NodePlan& plan, DescriptorStore& store,
                                                     std::vector<KeptDescriptor> kept, Log& log);
  ~Node();

  // Housekeeping that needs no hurry, called about once a second by whoever waits for signals: health facets.
  void tend();

  // From now on nothing new is taken; true once nothing is open any more.
  void drain();
  bool drained();
  bool drain_was_asked() const;  // by an operator

  void stop();

 private:
  class Impl;
  explicit Node(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace needle::server
