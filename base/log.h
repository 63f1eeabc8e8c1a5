// One structured line an event: level, event name, key=value pairs. A name used here is the name of the metric
// and the enum too.
//
// What must stay true:
//  1. The sink is passed in by main() or the test; no global logger.
//  2. A line is written where the error is first known, with the cause observed, and not again further up.
//  3. Values never carry cached bytes or secrets.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

namespace needle {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

struct LogField {
  std::string_view key;
  std::string value;
};

class Log {
 public:
  virtual ~Log() = default;
  virtual void write(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) = 0;
};

class SilentLog final : public Log {
 public:
  void write(LogLevel, std::string_view, std::initializer_list<LogField>) override {}
};

// Lines to a stdio stream that the caller owns and that outlives the log. Safe from any thread (stdio locks a line).
class StreamLog final : public Log {
 public:
  StreamLog(std::FILE* stream, LogLevel least) : stream_(stream), least_(least) {}

  void write(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) override {
    if (level < least_) return;
    static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
    std::string line = std::string("level=") + kNames[static_cast<int>(level)] + " event=";
    line.append(event);
    for (const LogField& field : fields) {
      line.append(" ").append(field.key).append("=");
      const bool quote = field.value.find_first_of(" \"\n") != std::string::npos || field.value.empty();
      if (!quote) {
        line.append(field.value);
        continue;
      }
      line.push_back('"');
      for (char c : field.value) {
        if (c == '"' || c == '\\') line.push_back('\\');
        line.push_back(c == '\n' ? ' ' : c);
      }
      line.push_back('"');
    }
    line.push_back('\n');
    std::fwrite(line.data(), 1, line.size(), stream_);
  }

 private:
  std::FILE* stream_;
  LogLevel least_;
};

}  // namespace needle
