// A daemon's name as 32 bits: what transports put on the wire. The same everywhere, for ever; two names with one hash are
// refused when they meet (peer_directory.h).
#pragma once

#include <string>

#include "base/ids.h"

namespace needle::server {

inline NodeId node_id_of(const std::string& name) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 16777619u;
  return NodeId(hash == 0xFFFFFFFFu ? 0 : hash);
}

}  // namespace needle::server
