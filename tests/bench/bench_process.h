// What benchmarks of several processes share: whole reads and writes of a pipe, processor time, pinning.
#pragma once

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"

namespace needle::bench {

inline void write_all(int fd, const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t done = write(fd, bytes, size);
    NEEDLE_CHECK(done > 0, "the other process is gone");
    bytes += done;
    size -= static_cast<size_t>(done);
  }
}

inline void read_all(int fd, void* data, size_t size) {
  char* bytes = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t done = read(fd, bytes, size);
    NEEDLE_CHECK(done > 0, "the other process is gone");
    bytes += done;
    size -= static_cast<size_t>(done);
  }
}

inline void write_text(int fd, const std::string& text) {
  const uint64_t size = text.size();
  write_all(fd, &size, sizeof size);
  write_all(fd, text.data(), text.size());
}

inline std::string read_text(int fd) {
  uint64_t size = 0;
  read_all(fd, &size, sizeof size);
  std::string text(size, '\0');
  read_all(fd, text.data(), size);
  return text;
}

// Of this process, user and kernel.
inline double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

inline void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}

}  // namespace needle::bench
