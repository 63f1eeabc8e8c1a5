// Is this node well, end to end? What `needlectl probe` does.
//
// The daemon recounts its pools and says how each part of it is. Then, for each pool set: attach as an engine does, reserve a
// scratch sequence of less than a page, store synthetic rows with this machine's kernels, seal, select from it in this process
// and by the daemon's kernels, and hold both against the reference kernel. With a peer, that page is shipped there, where the
// journey compares checksums on arrival; it is read back and selected from there too.
//
// What must stay true:
//  1. Nothing stays behind: a part of a page has no name, so that evicting the scratch sequence frees all of it; the peer
//     forgets its copy before the lease on it ends. After a failed step too.
//  2. Live pools are not disturbed: the sequence id is random, and where a pool has no free page the probe is refused, rather than evict
//     somebody's idle one. (A full peer makes room as for any ship: its occupancy is for its own operators to see.)
//  3. A step says what was compared; the first one that fails in a pool ends that pool's steps, all but the cleaning.
#pragma once

#include <string>
#include <vector>

#include "client/ctl/daemon.h"

namespace needle {

struct ProbeOptions {
  std::string pool;  // empty: all
  std::string peer;  // empty: this node alone
};

struct ProbeStep {
  std::string name;
  bool passed = false;
  double seconds = 0;
  std::string detail;
};

struct ProbeOutcome {
  int exit = kDone;  // the first failure's: kRefused, kRetryLater, kUnreachable
  std::vector<ProbeStep> steps;
};

ProbeOutcome probe_node(Daemon& daemon, const ProbeOptions& options);

}  // namespace needle
