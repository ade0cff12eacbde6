# What differs between systems has a source for each (base/system.h): takes those of others out of a
# list.
function(kqview_keep_this_system sources)
    set(other unix)
    if(NOT WIN32)
        set(other windows)
    endif()
    list(FILTER ${sources} EXCLUDE REGEX "_${other}\\.cpp$")
    set(${sources} "${${sources}}" PARENT_SCOPE)
endfunction()
