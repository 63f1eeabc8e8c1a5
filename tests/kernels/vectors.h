// The folder of real index vectors: keys and queries of trained heads, with golden top-512 sets.
//
// What must stay true:
//  1. The folder comes from NEEDLE_VECTORS_DIR at run time, the in-tree copies otherwise; a missing file is an error.
//  2. Which key formats a set has golden answers for is read from the files that lie there.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace needle::testing {

inline constexpr int kVectorDim = 128;
inline constexpr int kVectorTopk = 512;

struct VectorSet {
  std::string name;
  int keys = 0;
  int queries = 0;
  int heads = 0;
  std::vector<uint16_t> key_bits;    // [keys, 128] bf16
  std::vector<uint16_t> query_bits;  // [queries, heads, 128] bf16
  std::vector<float> weights;        // [queries, heads]
  // Key format -> [queries, 512] positions, best first. Formats: bf16, fp8 (scale amax/448), fp8_ue8m0 (scale rounded up
  // to a power of two), fp8_had_ue8m0 (keys and queries rotated and rounded to bf16 before), f32 (unrounded keys).
  std::map<std::string, std::vector<int32_t>> top512;
};

inline std::filesystem::path vectors_dir() {
  const char* chosen = std::getenv("NEEDLE_VECTORS_DIR");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  return std::filesystem::path(NEEDLE_SOURCE_DIR) / "tests" / "data" / "index-vectors";
}

template <class Number>
absl::StatusOr<std::vector<Number>> read_numbers(const std::filesystem::path& path, int64_t count) {
  std::vector<Number> numbers(static_cast<size_t>(count));
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(Number));
  if (!stream) return absl::NotFoundError(absl::StrCat("cannot open ", path.string()));
  if (static_cast<int64_t>(stream.tellg()) != bytes) {
    return absl::DataLossError(absl::StrCat(path.string(), " has ", static_cast<int64_t>(stream.tellg()), " bytes; ", bytes, " are due"));
  }
  stream.seekg(0);
  stream.read(reinterpret_cast<char*>(numbers.data()), bytes);
  return numbers;
}

// `name` is attn, retr or records.
inline absl::StatusOr<VectorSet> read_vectors(const std::string& name) {
  const std::filesystem::path dir = vectors_dir();
  const bool own_files = std::filesystem::exists(dir / (name + ".meta.json"));
  std::ifstream meta_stream(dir / (own_files ? name + ".meta.json" : "meta.json"));
  const nlohmann::json meta = nlohmann::json::parse(meta_stream, nullptr, /*allow_exceptions=*/false);
  if (!meta.is_object() || !meta.contains("n_keys") || !meta.contains("n_queries") || !meta.contains("n_heads")) {
    return absl::NotFoundError(absl::StrCat(dir.string(), " holds no readable meta.json for the set ", name));
  }
  VectorSet set;
  set.name = name;
  set.keys = meta["n_keys"].get<int>();
  set.queries = meta["n_queries"].get<int>();
  set.heads = meta["n_heads"].get<int>();

  const int64_t vectors = int64_t{set.queries} * set.heads;
  auto keys = read_numbers<uint16_t>(dir / (name + ".keys.bf16.bin"), int64_t{set.keys} * kVectorDim);
  if (!keys.ok()) return keys.status();
  set.key_bits = *std::move(keys);
  auto queries = read_numbers<uint16_t>(dir / (name + ".queries.bf16.bin"), vectors * kVectorDim);
  if (!queries.ok()) return queries.status();
  set.query_bits = *std::move(queries);
  auto weights = read_numbers<float>(dir / (own_files ? name + ".weights.f32.bin" : "weights.f32.bin"), vectors);
  if (!weights.ok()) return weights.status();
  set.weights = *std::move(weights);
  for (const char* format : {"bf16", "fp8", "fp8_ue8m0", "fp8_had_ue8m0", "f32"}) {
    const std::filesystem::path path = dir / absl::StrCat(name, ".top512.", format, ".i32.bin");
    if (!std::filesystem::exists(path)) continue;
    auto best = read_numbers<int32_t>(path, int64_t{set.queries} * kVectorTopk);
    if (!best.ok()) return best.status();
    set.top512[format] = *std::move(best);
  }
  if (set.top512.count("bf16") == 0) {
    return absl::NotFoundError(absl::StrCat(dir.string(), " holds no golden set of ", name, " for bf16 keys"));
  }
  return set;
}

}  // namespace needle::testing
