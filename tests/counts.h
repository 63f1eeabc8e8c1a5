// How many rounds a randomised test runs: the one table tests/counts.txt, its second column under NEEDLE_ACCEPT=1.
// A name missing from the table is a bug in the test, and stops it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "base/check.h"

namespace needle::testing {

inline int64_t count_of(const std::string& name) {
  std::ifstream table(NEEDLE_COUNTS_FILE);
  const char* accept = std::getenv("NEEDLE_ACCEPT");
  const bool full = accept != nullptr && std::string(accept) == "1";
  for (std::string line; std::getline(table, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t reduced = 0;
    int64_t complete = 0;
    if ((words >> key >> reduced >> complete) && key == name) return full ? complete : reduced;
  }
  NEEDLE_CHECK(false, "the test asks for a count that tests/counts.txt does not have");
  return 0;
}

}  // namespace needle::testing
