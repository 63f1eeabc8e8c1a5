// One layer of everything: index-K of 64 slots (16 KiB a page), a window page of 37 KiB, a record of 16 KiB. What matters is
// how many pages there are, not how large.
#pragma once

#include "kernels/format_set.h"

namespace needle::testing {

inline ModelFormats small_formats() {
  ModelFormats formats = *preset_formats("raw", PresetOptions());
  formats.paged.name = formats.window.name = formats.state.name = "small";
  formats.paged.components.resize(1);
  for (PageFormat* format : {&formats.paged, &formats.window, &formats.state}) {
    format->components.resize(1);
    format->components[0].layers = 1;
  }
  return formats;
}

}  // namespace needle::testing
